"""Rounding an FP32 tensor to a narrow format, whole numbers or a table of levels. Everything stays FP32.

A cast here is arithmetic, not a dtype conversion: torch's own E4M3 cast saturates in some releases and gives NaN in
others, and its way back to FP32 is a scalar loop. Three ways, each where it is exact:

nearest even          adding and subtracting 1.5 * 2^(e + 23 - M), where 2^e is the value's own power of two (at least
                      the smallest normal), makes the FP32 adder round to M mantissa bits;
other roundings       x over its quantum 2^(e - M) is split, without error, into a whole part and a remainder r. Half
                      away goes up for r >= 1/2, stochastic for u < r, where u is 24 random bits over 2^24;
8 exponent bits       FP32's own range, where these would overflow: the mantissa is rounded as an integer. Stochastic
                      adds as many random bits as fall away and cuts them off.

Ties of a format without mantissa bits go to the larger magnitude, as IEEE 754 says of one-digit significands and as
ml_dtypes casts E8M0. What a format holds beyond FP32's range does not exist here.
"""

from __future__ import annotations

import struct
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from harness.precision.formats import FloatFormat, TableFormat
from harness.precision.noise import uniform, upper

Rounding = Literal["nearest", "stochastic", "half_away"]
Overflow = Literal["saturate", "special"]

_EXPONENT, _SIGN, _MAGNITUDE = 0x7F800000, -0x80000000, 0x7FFFFFFF


def round_to(
    x: Tensor,
    fmt: FloatFormat,
    rounding: Rounding = "nearest",
    overflow: Overflow = "saturate",
    noise: Tensor | None = None,
) -> Tensor:
    """`x` (FP32, any shape) rounded to `fmt`: subnormals and the sign of zero kept, NaN kept.

    Beyond the maximum, infinity included: the maximum (`saturate`), or (`special`) what is above it after rounding
    becomes infinity or NaN, whichever the format has. `noise` is int32 random bits of x's shape, for `stochastic`.
    E8M0 has neither zero nor sign: both give NaN, and what is below 2^-127 gives 2^-127, as in ml_dtypes.
    """
    if not fmt.signed:
        return _round_unsigned_power(x, fmt, rounding, overflow, noise)
    if fmt.exponent_bits == 8:
        return _round_bits(x, fmt, rounding, overflow, noise)
    special = overflow == "special" and fmt.specials != "none"
    limit = 2.0 ** (fmt.max_exponent + 1) if special else fmt.max
    clamped = x.clamp(-limit, limit)
    if rounding == "nearest" and fmt.mantissa_bits <= 21:
        rounded = _add_and_subtract(clamped, fmt)
    else:
        rounded = _split(clamped, fmt, rounding, noise)
    if special:
        beyond = rounded.abs() > fmt.max
        rounded = torch.where(beyond, rounded * _special(fmt), rounded)
    return rounded


def largest(fmt: FloatFormat) -> float:
    """The format's largest value that FP32 holds."""
    return min(fmt.max, (2 - 2.0**-fmt.mantissa_bits) * 2.0**127)


def clip_threshold(maximum: float) -> float:
    """Scaled magnitudes above this count as clipped: amax * (max / amax) may come out a unit in the last place above
    max, and that element was not clipped. An FP32 number."""
    return (
        float(struct.unpack("<f", struct.pack("<f", maximum * (1 + 2.0**-22)))[0])
        if maximum < 2.0**127
        else maximum
    )


def round_whole(y: Tensor, rounding: Rounding = "nearest", noise: Tensor | None = None) -> Tensor:
    """`y` (FP32, finite or NaN) rounded to whole numbers; zero comes out positive, as integers have one zero."""
    if rounding == "nearest":
        whole = torch.round(y)
    else:
        magnitude = y.abs()
        whole = torch.copysign(_whole_part(magnitude, rounding, noise), y)
    return torch.where(whole == 0, 0.0, whole)


def round_level(x: Tensor, fmt: TableFormat) -> Tensor:
    """`x` (FP32) moved to the nearest level of the table, a tie to the lower one; NaN kept."""
    levels = torch.tensor(fmt.levels, dtype=torch.float32, device=x.device)
    edges = torch.tensor(level_edges(fmt), dtype=torch.float32, device=x.device)
    nearest = levels[torch.bucketize(x.contiguous(), edges)]
    return torch.where(torch.isnan(x), x, nearest)


@cache
def level_edges(fmt: TableFormat) -> tuple[float, ...]:
    """Between each two levels the largest FP32 number that is not nearer to the upper one: x > edge goes up."""
    edges = []
    for low, high in zip(fmt.levels, fmt.levels[1:], strict=False):
        middle = (low + high) / 2  # exact in FP64, as the levels are FP32
        bits = struct.unpack("<i", struct.pack("<f", middle))[0]
        edge = struct.unpack("<f", struct.pack("<i", bits))[0]
        if edge > middle:
            edge = struct.unpack("<f", struct.pack("<i", bits - 1 if edge > 0 else bits + 1))[0]
        edges.append(edge)
    return tuple(edges)


def _special(fmt: FloatFormat) -> float:
    return float("inf") if fmt.has_infinity else float("nan")


def _add_and_subtract(clamped: Tensor, fmt: FloatFormat) -> Tensor:
    """Nearest even, in place on `clamped`."""
    bits = clamped.view(torch.int32)
    power = bits.bitwise_and(_EXPONENT).view(torch.float32)
    shift = power.clamp_(min=fmt.min_normal).mul_(1.5 * 2.0 ** (23 - fmt.mantissa_bits))
    sign = bits.bitwise_and(_SIGN)
    clamped.add_(shift).sub_(shift)
    bits.bitwise_or_(sign)  # what underflows to zero keeps its sign; torch.copysign is a scalar loop
    return clamped


def _split(clamped: Tensor, fmt: FloatFormat, rounding: Rounding, noise: Tensor | None) -> Tensor:
    """Any rounding, by whole part and remainder of the magnitude over its quantum; all steps are exact."""
    bits = clamped.view(torch.int32)
    power = (bits & _EXPONENT).view(torch.float32).clamp(min=fmt.min_normal)
    inverse = (0x7F000000 - power.view(torch.int32)).view(torch.float32)  # 1 / power, by its bits
    magnitude = clamped.abs() * (inverse * 2.0**fmt.mantissa_bits)
    whole = torch.round(magnitude) if rounding == "nearest" else _whole_part(magnitude, rounding, noise)
    rounded = whole * (power * 2.0**-fmt.mantissa_bits)
    return (rounded.view(torch.int32) | (bits & _SIGN)).view(torch.float32)


def _whole_part(magnitude: Tensor, rounding: Rounding, noise: Tensor | None) -> Tensor:
    whole = torch.floor(magnitude)
    remainder = magnitude - whole
    if rounding == "half_away":
        return whole + (remainder >= 0.5)
    if noise is None:
        raise ValueError("stochastic rounding needs random bits")
    return whole + (uniform(noise) < remainder)


def _round_mantissa(magnitude: Tensor, dropped: int, rounding: Rounding, noise: Tensor | None) -> Tensor:
    """Non-negative int32 bits of FP32 numbers up to infinity, with the lower `dropped` bits rounded away."""
    half = 1 << (dropped - 1)
    if rounding == "nearest":
        last = magnitude >> dropped
        odd = (
            last.clamp(max=1) if dropped == 23 else last & 1
        )  # one-digit significands: ties go up, but for zero's
        raised = magnitude + (half - 1) + odd
    elif rounding == "half_away":
        raised = magnitude + half
    elif noise is not None:
        raised = magnitude + upper(noise, dropped)
    else:
        raise ValueError("stochastic rounding needs random bits")
    return raised & -(1 << dropped)


def _bits_of(value: float) -> int:
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


def _round_bits(
    x: Tensor, fmt: FloatFormat, rounding: Rounding, overflow: Overflow, noise: Tensor | None
) -> Tensor:
    """A format with FP32's exponent range: the subnormals' quantum is a mantissa bit of FP32's subnormals too."""
    bits = x.view(torch.int32)
    magnitude = (bits & _MAGNITUDE).clamp(max=_EXPONENT)
    if fmt.mantissa_bits < 23:
        magnitude = _round_mantissa(magnitude, 23 - fmt.mantissa_bits, rounding, noise)
    top = largest(fmt)
    if overflow == "special" and fmt.specials != "none":
        beyond = _EXPONENT if fmt.has_infinity else _MAGNITUDE
        magnitude = torch.where(magnitude > _bits_of(top), beyond, magnitude)
    else:
        magnitude = magnitude.clamp(max=_bits_of(top))
    rounded = (magnitude | (bits & _SIGN)).view(torch.float32)
    return torch.where(torch.isnan(x), x, rounded)


def _round_unsigned_power(
    x: Tensor, fmt: FloatFormat, rounding: Rounding, overflow: Overflow, noise: Tensor | None
) -> Tensor:
    """E8M0. Below FP32's normal range only 2^-127 is on the grid. Nearest takes all above it to 2^-126, although the
    lower half is nearer to 2^-127: so do ml_dtypes 0.5-0.6 and torch's float8_e8m0fnu.
    """
    magnitude = x.view(torch.int32).clamp(max=_EXPONENT)
    normal = _round_mantissa(magnitude, 23, rounding, noise)
    smallest, first_normal = 0x00400000, 0x00800000
    if rounding == "nearest":
        subnormal = smallest + (magnitude > smallest) * (first_normal - smallest)
    else:
        above = (magnitude - smallest).clamp(min=0)
        subnormal = smallest + _round_mantissa(above, 22, rounding, noise)
    rounded = torch.where(magnitude < first_normal, subnormal, normal)
    top = _bits_of(largest(fmt))
    beyond = _MAGNITUDE if overflow == "special" else top
    rounded = torch.where(rounded > top, beyond, rounded).to(torch.int32).view(torch.float32)
    return torch.where(x > 0, rounded, torch.nan)
