"""A number format's constants, found by experiment: what the cast lets through, not what a description says.

Scope "" is the suite's own cast, "torch" PyTorch's cast to its own dtype and "finfo" what torch.finfo says of it.
FP32 numbers are the probes: all formats here are subsets of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harness.precision.cast import cast, dequantize, implementation_for
from harness.precision.formats import FloatFormat, IntFormat, find_format
from harness.spec import QuantizerSpec, RunSpec
from results.journal import JournalWriter

NATIVE_DTYPES = {
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "e4m3": "float8_e4m3fn",
    "e5m2": "float8_e5m2",
    "e8m0": "float8_e8m0fnu",
}
"""Formats that PyTorch has as a dtype, where its version does."""

_TOP = 0x7F7FFFFF
"""Bits of the largest finite FP32 number."""
_COARSE = 13
"""Low bits of FP32 that are zero in the probes that count values: 10 mantissa bits are left."""
_LEVELS_RAMP = 1 << 16

Cast = Callable[[Tensor], Tensor]
"""FP32 [n] -> FP32 [n], each element cast by itself."""


def formats(spec: RunSpec, request: dict[str, Any], journal: JournalWriter, checkpoints: Path) -> list[Path]:
    """Measure the constants of `spec.format` at step 1."""
    fmt = find_format(spec.format)
    device = torch.device(spec.device)
    journal.note("cast_implementation", *implementation_for(device))
    if isinstance(fmt, FloatFormat):
        own = _elementwise(QuantizerSpec(format=fmt.name, scaling="none", overflow="special"), device)
        journal.measure(1, constants(own, device))
        native = native_cast(fmt.name)
        if native is not None:
            dtype, native_values = native
            journal.measure(1, constants(native_values, device), scope="torch")
            journal.measure(1, {"format_mismatches": mismatches(own, native_values, device)}, scope="torch")
            journal.measure(1, finfo(dtype), scope="finfo")
            journal.note("torch_dtype", str(dtype), "PyTorch's own dtype of this format")
    else:
        journal.measure(1, {"format_num_levels": num_levels(spec.format, device)})
        if isinstance(fmt, IntFormat) and fmt.symmetric:
            unscaled = _elementwise(QuantizerSpec(format=fmt.name, scaling="none"), device)
            ramp = torch.arange(0, 1024, device=device, dtype=torch.float32)
            journal.measure(1, {"format_max": float(unscaled(ramp).max())})
    return []


def _elementwise(spec: QuantizerSpec, device: torch.device) -> Cast:
    def values(x: Tensor) -> Tensor:
        return dequantize(cast(x.to(device).reshape(1, -1), spec)).reshape(-1)

    return values


def native_cast(name: str) -> tuple[torch.dtype, Cast] | None:
    """PyTorch's dtype of a format and its cast there and back; None where it has none."""
    dtype = getattr(torch, NATIVE_DTYPES.get(name, ""), None)
    if not isinstance(dtype, torch.dtype):
        return None
    return dtype, lambda x: x.to(dtype).to(torch.float32)


def constants(values: Cast, device: torch.device) -> dict[str, float | None]:
    """What `values` reveals of its format, metric by metric; None where probes of FP32 cannot tell."""
    overflow = _first(lambda x: ~torch.isfinite(values(x)), device)
    top = values(_numbers([overflow - 1 if overflow is not None else _TOP], device))
    largest = float(top[0])
    kept = _first(lambda x: values(x) > 0, device)
    smallest = float(values(_numbers([kept], device))[0]) if kept is not None else math.nan
    beyond = values(torch.tensor([math.inf], device=device))[0]
    finest, min_normal = _resolution(values, device)
    return {
        "format_max": largest,
        "format_min_positive": smallest,
        "format_min_normal": min_normal,
        "format_mantissa_bits": finest,
        "format_epsilon": _epsilon(values, device),
        "format_binades": math.log2(largest) - math.log2(smallest),
        "format_num_magnitudes": _num_magnitudes(values, device) if finest <= 23 - _COARSE else None,
        "format_overflow_start": float(_numbers([overflow], device)[0]) if overflow is not None else None,
        "format_overflows_to_infinity": float(torch.isinf(beyond)),
        "format_overflows_to_nan": float(torch.isnan(beyond)),
    }


def _numbers(bits: list[int] | Tensor, device: torch.device) -> Tensor:
    """The FP32 numbers with these bits."""
    return torch.as_tensor(bits, dtype=torch.int32, device=device).view(torch.float32)


def _first(is_true: Callable[[Tensor], Tensor], device: torch.device) -> int | None:
    """Bits of the smallest positive FP32 number where `is_true`, which stays true from there on; None: nowhere.

    Two rounds of 2^16 numbers each, as a search of one element at a time would call the cast 31 times.
    """
    high = torch.arange(0, (_TOP >> 16) + 1, device=device, dtype=torch.int32) << 16 | 0xFFFF
    found = is_true(_numbers(high.clamp(max=_TOP), device)).nonzero()
    if not len(found):
        return None
    low = (int(found[0]) << 16) + torch.arange(0, 1 << 16, device=device, dtype=torch.int32)
    low = low[(low > 0) & (low <= _TOP)]
    return int(low[int(is_true(_numbers(low, device)).nonzero()[0])])


def _resolution(values: Cast, device: torch.device) -> tuple[int, float]:
    """(bits below the leading one in the finest binade, smallest power of two that has them).

    For each binade 2^k the largest j with 2^k (1 + 2^-j) in the format; j = 0 stands for 2^k itself.
    """
    k = torch.arange(-149, 128, device=device, dtype=torch.float64)[:, None]
    j = torch.arange(1, 24, device=device, dtype=torch.float64)[None, :]
    exact = torch.cat([torch.exp2(k), torch.exp2(k) * (1 + torch.exp2(-j))], dim=1)
    probes = exact.to(torch.float32)
    survives = (values(probes.reshape(-1)).reshape(probes.shape) == probes) & (probes.double() == exact)
    bits = torch.arange(0, 24, device=device)[None, :].expand(survives.shape)
    finest_of_binade = torch.where(survives, bits, -1).amax(dim=1)
    finest = int(finest_of_binade.max())
    first = int((finest_of_binade == finest).nonzero()[0])
    return finest, float(2.0 ** float(k[first, 0]))


def _epsilon(values: Cast, device: torch.device) -> float | None:
    """Distance from 1 to the next larger value, by halving it; None where 1 is no value."""
    steps = torch.exp2(-torch.arange(0, 24, device=device, dtype=torch.float32))
    one = torch.ones(1, device=device)
    survives = values(1 + steps) == 1 + steps
    if not bool(values(one) == one) or not bool(survives.any()):
        return None
    return float(steps[survives].min())


def _num_magnitudes(values: Cast, device: torch.device) -> float:
    """Values that are not negative, counted one by one among the FP32 numbers of 10 mantissa bits."""
    probes = _numbers(torch.arange(0, _TOP, 1 << _COARSE, device=device, dtype=torch.int32), device)
    return float((values(probes) == probes).sum())


def num_levels(name: str, device: torch.device) -> float:
    """Distinct values that a dense ramp of the format's own range becomes."""
    fmt = find_format(name)
    low = 0.0 if isinstance(fmt, IntFormat) and not fmt.symmetric else -1.0
    ramp = torch.linspace(low, 1, _LEVELS_RAMP, device=device).reshape(1, -1)
    if not isinstance(fmt, IntFormat):
        # A table is scaled per block: each holds both ends, so that all have the same scale.
        blocks = ramp.reshape(-1, 32)
        ends = torch.ones(blocks.shape[0], 32, device=device)
        ends[:, ::2] = -1
        ramp = torch.cat([blocks, ends], dim=1).reshape(1, -1)
        spec = QuantizerSpec(format=name, scaling="block", block=(1, 64))
    else:
        spec = QuantizerSpec(format=name, scaling="row")
    return float(dequantize(cast(ramp, spec)).unique().numel())


def mismatches(values: Cast, native: Cast, device: torch.device) -> float:
    """FP32 probes within both casts' finite range that they do not round alike."""
    positive = torch.arange(0, _TOP, (1 << _COARSE) - 1, device=device, dtype=torch.int32)
    probes = torch.cat([_numbers(positive, device), -_numbers(positive, device)])
    mine, theirs = values(probes), native(probes)
    both = torch.isfinite(mine) & torch.isfinite(theirs)
    return float((mine[both] != theirs[both]).sum())


def finfo(dtype: torch.dtype) -> dict[str, float]:
    """What PyTorch says of its dtype."""
    info = torch.finfo(dtype)
    return {
        "format_max": float(info.max),
        "format_min_normal": float(info.smallest_normal),
        "format_epsilon": float(info.eps),
    }
