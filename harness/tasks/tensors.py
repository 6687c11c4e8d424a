"""What a cast does to tensors of known make: noise of the bulk and of the outliers, clipping, flushing.

A sequence of tensors stands for one linear's operand over training steps; delayed scaling then has a history, a sudden
outlier meets a stale scale (it is clipped), and once it is gone its scale stays (the bulk is flushed in its shadow).

Scopes: "all", "bulk" (elements that are no outliers) and "outliers".
"""

from __future__ import annotations

import math
from collections import deque
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harness.precision.cast import NO_NOISE_DB, cast, dequantize, implementation_for
from harness.precision.scales import encode_scale
from harness.spec import QuantizerSpec, RunSpec, TensorSpec
from harness.spec.notation import parse_cast
from results.journal import JournalWriter

STUDENT_T_DEGREES = 4
LOG_UNIFORM_BINADES = 16


def tensors(spec: RunSpec, request: dict[str, Any], journal: JournalWriter, checkpoints: Path) -> list[Path]:
    """Cast each tensor of the sequence and record what became of it. Raises ValueError for a run without a cast."""
    if not spec.cast:
        raise ValueError("task tensors needs a cast, such as e4m3:current")
    quantizer = parse_cast(spec.cast)
    device = torch.device(spec.device)
    journal.note("cast_implementation", *implementation_for(device))
    generator = torch.Generator().manual_seed(spec.seed)
    outliers = outlier_places(spec.tensor, generator)
    history: deque[float] = deque(maxlen=quantizer.history)
    for step in range(1, spec.tensor.steps + 1):
        x = make_tensor(spec.tensor, generator, outliers, with_outliers=spec.tensor.has_outliers(step))
        present = outliers if spec.tensor.has_outliers(step) else torch.zeros_like(outliers)
        scale = delayed_scale(quantizer, history, x) if quantizer.scaling == "delayed" else None
        for scope, values in measured(x.to(device), present.to(device), quantizer, scale, spec.seed).items():
            journal.measure(step, values, scope=scope)
        history.append(float(x.abs().max()))
        journal.beat()
    return []


def outlier_places(spec: TensorSpec, generator: torch.Generator) -> Tensor:
    """Which elements of [rows, cols] are outliers; at least one, if there are to be any."""
    places = torch.zeros(spec.rows, spec.cols, dtype=torch.bool)
    if not spec.outlier_sigmas:
        return places
    total = {"isolated": spec.rows * spec.cols, "channels": spec.cols, "tokens": spec.rows}[spec.outliers]
    chosen = torch.randperm(total, generator=generator)[: max(1, round(spec.outlier_share * total))]
    if spec.outliers == "channels":
        places[:, chosen] = True
    elif spec.outliers == "tokens":
        places[chosen] = True
    else:
        places.view(-1)[chosen] = True
    return places


def make_tensor(
    spec: TensorSpec, generator: torch.Generator, outliers: Tensor, *, with_outliers: bool
) -> Tensor:
    """FP32 [rows, cols]: the bulk with standard deviation 1, and outliers with random signs.

    The generator moves on by the same amount with outliers and without.
    """
    shape = (spec.rows, spec.cols)
    x = torch.randn(shape, generator=generator)
    signs = torch.randint(0, 2, shape, generator=generator) * 2.0 - 1.0
    sizes = torch.rand(shape, generator=generator) if spec.outlier_spread else torch.zeros(())
    if spec.distribution == "student_t":
        degrees = STUDENT_T_DEGREES
        chi2 = torch.randn((degrees, *shape), generator=generator).square().sum(dim=0)
        x = x / (chi2 / degrees).sqrt() / math.sqrt(degrees / (degrees - 2))
    elif spec.distribution == "log_uniform":
        exponents = torch.rand(shape, generator=generator) * LOG_UNIFORM_BINADES
        mean_square = (4.0**LOG_UNIFORM_BINADES - 1) / (LOG_UNIFORM_BINADES * math.log(4.0))
        x = x.sign() * torch.exp2(exponents) / math.sqrt(mean_square)
    if not with_outliers:
        return x
    return torch.where(outliers, signs * spec.outlier_sigmas * torch.exp2(-spec.outlier_spread * sizes), x)


def delayed_scale(quantizer: QuantizerSpec, history: deque[float], x: Tensor) -> Tensor:
    """The encode scale that the history of amax gives; before there is one, that of the first tensor itself."""
    past = list(history) or [float(x.abs().max())]
    return encode_scale(torch.tensor(past[-1] if quantizer.amax == "most_recent" else max(past)), quantizer)


def measured(
    x: Tensor, outliers: Tensor, quantizer: QuantizerSpec, scale: Tensor | None, seed: int
) -> dict[str, dict[str, float | None]]:
    """Scope -> metrics of one tensor's cast."""
    options: dict[str, Any] = {"scale": None if scale is None else scale.to(x.device), "seed": seed}
    result = cast(x, quantizer, collect=True, **options)
    noise = dequantize(result).double() - x.double()
    clipped = {"all": clipped_in(x, quantizer, options)}
    # A block without an outlier has nothing left here, and one with keeps its amax: the rest of it is not clipped.
    clipped["outliers"] = clipped_in(torch.where(outliers, x, 0.0), quantizer, options)
    clipped["bulk"] = clipped["all"] - clipped["outliers"]
    masks = {"all": torch.ones_like(outliers), "bulk": ~outliers, "outliers": outliers}
    found: dict[str, dict[str, float | None]] = {}
    for scope, mask in masks.items():
        num_nonzero = int((mask & (x != 0)).sum())
        if not num_nonzero:
            continue
        flushed = int((mask & (x != 0) & (x.double() + noise == 0)).sum())
        found[scope] = {
            "quant_sqnr_db": sqnr_db(x[mask], noise[mask]),
            "quant_clipped_fraction": clipped[scope] / num_nonzero,
            "quant_flushed_fraction": flushed / num_nonzero,
        }
    found["all"]["quant_amax"] = float(x.abs().max())
    if scale is not None:
        found["all"]["quant_scale"] = float(scale)
    saturated = saturated_blocks(x, quantizer, options)
    if saturated is not None:
        found["all"]["quant_saturated_blocks"] = saturated
    return found


def clipped_in(x: Tensor, quantizer: QuantizerSpec, options: dict[str, Any]) -> int:
    """Elements of `x` beyond the format's largest, as the cast counts them."""
    statistics = cast(x, quantizer, collect=True, **options).statistics
    assert statistics is not None
    return int(statistics.clipped)


def saturated_blocks(x: Tensor, quantizer: QuantizerSpec, options: dict[str, Any]) -> float | None:
    """Share of the 1-D blocks whose largest element is clipped; None where scales are not per such block."""
    across, along = quantizer.block_shape or (0, 0)
    if across != 1 or x.shape[1] % along or quantizer.keep_top:
        return None
    blocks = x.reshape(-1, along)
    largest = blocks.abs().argmax(dim=1, keepdim=True)
    alone = torch.zeros_like(blocks).scatter(1, largest, blocks.gather(1, largest))
    return clipped_in(alone.reshape(x.shape), quantizer, options) / len(blocks)


def sqnr_db(x: Tensor, noise: Tensor) -> float:
    """10 log10(sum x^2 / sum noise^2)."""
    power = float(noise.square().sum())
    return NO_NOISE_DB if power == 0 else 10 * math.log10(float(x.double().square().sum()) / power)
