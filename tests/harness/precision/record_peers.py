"""What torchao and bitsandbytes make of some tensors, kept in data/peers.npz so that tests need neither.

    python tests/harness/precision/record_peers.py      # where both are installed

The archive holds the inputs, one array per peer and cast (its key is PEER/CAST, the cast in the notation of
`harness.spec.notation`) and the versions.
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

ARCHIVE = Path(__file__).parent / "data" / "peers.npz"
Array = np.ndarray[Any, Any]


def inputs() -> Array:
    """FP32 [11, 2, 64], each [2, 64] a tensor: Gaussian, of many magnitudes, and around the formats' maxima and ties.

    Block maxima are from 2^-100 up: below, torchao's scales are not those of the text (see docs/precision.md).
    """
    rng = np.random.default_rng(20)
    normal = rng.standard_normal((3, 2, 64))
    normal[1] *= 2.0 ** rng.integers(-8, 8, (2, 64))
    normal[2] = np.ldexp(normal[2], [[-95], [110]])
    edges = np.zeros((8, 2, 64), np.float32)
    tops = (448.0, 57344.0, 28.0, 7.5, 6.0, 1.0, 1.75, 1.9375)
    for tensor, top in zip(edges, tops, strict=True):
        blocks = tensor.reshape(4, 32)
        blocks[:3] = -top * np.arange(32) / 31  # maxima, and ties of most grids among the rest
        blocks[:3, 31] = -top, np.nextafter(np.float32(top), 2 * top), np.nextafter(np.float32(top), 0)
        blocks[:, 0] = -0.0
    return np.concatenate([normal.astype(np.float32), edges])


def torchao_mx() -> dict[str, Any]:
    """Cast -> function of an FP32 tensor, by torchao's MX tensors in each scaling mode."""
    from torchao.prototype.mx_formats import constants
    from torchao.prototype.mx_formats.mx_tensor import MXTensor, ScaleCalculationMode

    dtypes = {
        "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "e3m2": constants.DTYPE_FP6_E3M2,
        "e2m3": constants.DTYPE_FP6_E2M3, "e2m1": torch.float4_e2m1fn_x2,
    }  # fmt: skip
    modes = {
        "floor": ScaleCalculationMode.FLOOR, "up": ScaleCalculationMode.RCEIL, "even": ScaleCalculationMode.EVEN,
    }  # fmt: skip

    def function(name: str, rule: str) -> Any:
        return lambda x: MXTensor.to_mx(x, dtypes[name], 32, modes[rule]).dequantize(torch.float32)

    return {f"{name}:mx:{rule}": function(name, rule) for name in dtypes for rule in modes}


def torchao_nvfp4(x: torch.Tensor) -> torch.Tensor:
    """Two-level NVFP4: E2M1 code times E4M3 scale, without the outer scale."""
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    outer = per_tensor_amax_to_scale(x.abs().max())
    one = NVFP4Tensor.to_nvfp4(x, per_tensor_scale=outer)
    one.per_tensor_scale = None  # what is left then is the product of element and block scale
    return one.dequantize(torch.float32)


def bitsandbytes_nf4(x: torch.Tensor) -> torch.Tensor:
    import bitsandbytes.functional as bnb

    codes, state = bnb.quantize_4bit(x, blocksize=64, quant_type="nf4", compress_statistics=False)
    dequantized: torch.Tensor = bnb.dequantize_4bit(codes, state)
    return dequantized


def main() -> None:
    """MX values and NVFP4 values without the outer scale are BF16 numbers, and kept as such."""
    x = inputs()
    casts = {f"torchao/{text}": function for text, function in torchao_mx().items()}
    casts["torchao/nvfp4"] = torchao_nvfp4
    casts["bitsandbytes/nf4:block64"] = bitsandbytes_nf4
    kept: dict[str, Array] = {"input": x}
    for key, function in casts.items():
        values = torch.stack([function(torch.from_numpy(one)) for one in x])
        narrow = values.bfloat16()
        exact = torch.equal(narrow.float(), values)
        kept[key] = narrow.view(torch.int16).numpy() if exact else values.numpy()
    for peer in ("torchao", "bitsandbytes", "torch"):
        kept[f"version/{peer}"] = np.array(importlib.metadata.version(peer))
    ARCHIVE.parent.mkdir(exist_ok=True)
    np.savez_compressed(ARCHIVE, allow_pickle=False, **kept)


def recorded() -> dict[str, Array]:
    """The archive, its values in FP32."""
    with np.load(ARCHIVE, allow_pickle=False) as archive:
        kept = {key: archive[key] for key in archive.files}
    for key, values in kept.items():
        if values.dtype == np.int16:
            kept[key] = torch.from_numpy(values).view(torch.bfloat16).float().numpy()
    return kept


if __name__ == "__main__":
    main()
