"""The formats and the linear's arithmetic once more, in NumPy and ml_dtypes; none of it is the harness's."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch

from harness.models.transformer import Transformer, build
from harness.spec import ModelSpec, QuantizerSpec, RecipeSpec

Array = npt.NDArray[Any]

DTYPES = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e2m1": ml_dtypes.float4_e2m1fn,
}
MAXIMA = {"e4m3": 448.0, "e5m2": 57344.0, "e2m1": 6.0}


def cast(x: Array, fmt: str) -> Array:
    """FP32 values rounded by ml_dtypes, saturating: its cast of the clamped input."""
    clamped = np.clip(x.astype(np.float32), -np.float32(MAXIMA[fmt]), np.float32(MAXIMA[fmt]))
    with np.errstate(invalid="ignore"):  # NaN stays NaN
        return clamped.astype(DTYPES[fmt]).astype(np.float32)


def quantize(x: Array, fmt: str, amax: float | None = None) -> tuple[Array, float]:
    """(values on the grid, scale) of a per-tensor cast whose scale comes from `amax`, or from x itself."""
    reference = np.float32(np.abs(x).max() if amax is None else amax)
    scale = np.float32(MAXIMA[fmt]) / reference
    return cast(x.astype(np.float32) * scale, fmt), float(scale)


def dequantize(x: Array, fmt: str, amax: float | None = None) -> Array:
    """What is left of `x` after the cast, in FP64."""
    q, scale = quantize(x, fmt, amax)
    return q.astype(np.float64) / scale


def recipe(scaling: str = "current", high_precision: tuple[str, ...] = ("head",), **more: Any) -> RecipeSpec:
    """E4M3 forward, E5M2 gradients."""
    forward = QuantizerSpec(format="e4m3", scaling=scaling, **more)  # type: ignore[arg-type]
    backward = QuantizerSpec(format="e5m2", scaling=scaling, **more)  # type: ignore[arg-type]
    return RecipeSpec(activations=forward, weights=forward, gradients=backward, high_precision=high_precision)


def tiny_model(seed: int = 0, **changes: Any) -> Transformer:
    """2 layers, width 32, 61 tokens."""
    shape = {"num_layers": 2, "d_model": 32, "num_heads": 4, "num_kv_heads": 2, "d_ffn": 48}
    return build(ModelSpec(name="tiny", **{**shape, **changes}), vocab_size=61, seed=seed)


def tokens(seed: int = 0, batch: int = 2, length: int = 12) -> torch.Tensor:
    return torch.randint(0, 61, (batch, length), generator=torch.Generator().manual_seed(seed))
