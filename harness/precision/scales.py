"""The scales of a cast: factors before and after rounding, for each way of scaling.

Operands are [n, k] with the contraction last. Blocks are seen as [n / across, across, k / along, along], the operand
padded with zeros where it does not divide, and their scales broadcast over that.
Everything is FP32; a power of two is taken from a number's bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from harness.precision.formats import E4M3, FloatFormat, IntFormat, find_format
from harness.precision.rounding import largest, round_to
from harness.spec import QuantizerSpec

SCALE_LIMIT = 2.0**120
MX_MIN, MX_MAX = -127, 127
"""Exponents of an E8M0 scale."""
MXINT8_UNIT = 2.0**-6
"""MXINT8's elements are multiples of this."""
_EXPONENT = 0x7F800000


@dataclass(frozen=True)
class Scales:
    """x * encode is rounded; times `decode` and then times `inverse` it is the dequantised value. None stands for 1."""

    encode: Tensor | None
    decode: Tensor | None = None
    """Per block, so it cannot stand outside a product."""
    inverse: Tensor | None = None
    """Per tensor or row."""
    zero_point: Tensor | None = None


def absolute_maximum(x: Tensor) -> Tensor:
    """max |x| of the whole tensor, an FP32 scalar: 0 if it is empty, NaN if it holds one."""
    if not x.numel():
        return torch.zeros((), device=x.device)
    low, high = x.aminmax()
    return torch.maximum(low.abs(), high.abs()).float()


def encode_scale(amax: Tensor, spec: QuantizerSpec) -> Tensor:
    """The factor that brings `amax` (FP32, any shape) to the format's maximum over 2^margin.

    1 where amax is 0 or not finite; from 2^-120 to 2^120; rounded down to a power of two where the spec says so.
    """
    fmt = find_format(spec.format)
    maximum = largest(fmt) if isinstance(fmt, FloatFormat) else float(fmt.max)
    usable = (amax > 0) & torch.isfinite(amax)
    # the dividend is a tensor: torch may turn scalar / tensor into a multiplication by the reciprocal
    dividend = torch.full_like(amax, maximum / 2.0**spec.margin)
    scale = torch.where(usable, dividend / amax, 1.0)
    if spec.power_of_two:
        scale = floor_power_of_two(scale)
    return scale.clamp(1 / SCALE_LIMIT, SCALE_LIMIT)


def floor_power_of_two(x: Tensor) -> Tensor:
    """The largest power of two not above `x` (positive and normal)."""
    return (x.view(torch.int32) & _EXPONENT).view(torch.float32)


def power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent for int32 exponents from -127 to 127; the lowest is an FP32 subnormal."""
    bits = torch.where(exponent > -127, (exponent + 127) << 23, 0x00400000)
    return bits.to(torch.int32).view(torch.float32)


def step_scales(low: Tensor, high: Tensor, spec: QuantizerSpec, per_block: bool) -> Scales:
    """Integer and table formats: multiply by 1/d, then by d, the step (a table's step is its block's maximum).

    d is 1 where the data give none (all zero, or infinite), and at least 2^-126, so that 1/d is finite. A zero point
    is what 0 becomes; 0 where the data give no step.
    """
    fmt = find_format(spec.format)
    if isinstance(fmt, IntFormat) and not fmt.symmetric:
        low, high = low.clamp(max=0), high.clamp(min=0)
        extent = high - low
    else:
        extent = torch.maximum(low.abs(), high.abs()) * 2.0**spec.margin
    step = extent / torch.full_like(extent, float(fmt.max))
    usable = (extent > 0) & torch.isfinite(step)
    step = torch.where(usable, step.clamp(min=2.0**-126), 1.0)
    encode = step.reciprocal()
    if spec.power_of_two:
        encode = floor_power_of_two(encode)
        step = encode.reciprocal()
    zero_point = None
    if isinstance(fmt, IntFormat) and not fmt.symmetric:
        zero_point = torch.where(usable, torch.round(-low / step).clamp(0, fmt.max), 0.0)
    if per_block:
        return Scales(encode, decode=step, zero_point=zero_point)
    return Scales(encode, inverse=step, zero_point=zero_point)


def mx_scales(amax: Tensor, spec: QuantizerSpec) -> Scales:
    """Powers of two from -127 to 127 (E8M0). A block with NaN or infinity becomes NaN; a block of zeros gets 2^-127.

    floor: floor(log2 amax) - emax, OCP Microscaling Formats 1.0 section 6.3, which clips what the element format
    cannot hold; up: the smallest exponent with amax / 2^E <= max; even: amax rounded to the element's mantissa first
    (a tie at the top of a binade goes up under nearest even as under half away).
    """
    fmt = find_format(spec.format)
    if isinstance(fmt, FloatFormat):
        maximum, emax, mantissa_bits = largest(fmt), fmt.max_exponent, fmt.mantissa_bits
    else:
        maximum, emax, mantissa_bits = float(fmt.max) * MXINT8_UNIT, 0, 6
    finite = torch.isfinite(amax)
    small = amax < 2.0**-100  # lifted, so that subnormals too have an exponent field
    lifted = torch.where(small, amax * 2.0**30, torch.where(finite, amax, 0.0))
    bits = lifted.view(torch.int32)
    if spec.scale_rounding == "even" and mantissa_bits < 23:
        bits = bits + (1 << (22 - mantissa_bits))
    exponent = (bits >> 23) - 127 - emax
    if spec.scale_rounding == "up":
        top = torch.full((), maximum / 2.0**emax).view(torch.int32).item()
        exponent = exponent + ((bits & 0x7FFFFF) > (int(top) & 0x7FFFFF))
    exponent = torch.where(small, exponent - 30, exponent).clamp(MX_MIN, MX_MAX)
    exponent = torch.where(amax == 0, MX_MIN, exponent)
    encode = torch.where(finite, power_of_two(-exponent), torch.nan)
    return Scales(encode, decode=power_of_two(exponent))


def nvfp4_outer(tensor_amax: Tensor) -> Tensor:
    """The FP32 scale of the whole tensor, 6 * 448 / amax: 1 where amax is 0 or not finite, and within 2^-118 .. 2^118,
    where every block's factor is finite."""
    usable = (tensor_amax > 0) & torch.isfinite(tensor_amax)
    outer = torch.where(usable, torch.full_like(tensor_amax, 6.0 * 448.0) / tensor_amax, 1.0)
    return outer.clamp(2.0**-118, 2.0**118)


def nvfp4_scales(amax: Tensor, tensor_amax: Tensor) -> Scales:
    """E4M3 scales per block under one FP32 scale per tensor (arXiv 2509.25149). A block whose scale rounds to zero in
    E4M3 becomes zero; torchao keeps such scales at 2^-6 or more instead."""
    outer = nvfp4_outer(tensor_amax)
    stored = round_to((amax / torch.full_like(amax, 6.0)) * outer, E4M3)
    encode = torch.where(stored > 0, outer / stored, 0.0)
    return Scales(encode, decode=stored, inverse=outer.reciprocal())


def to_blocks(x: Tensor, block: tuple[int, int]) -> Tensor:
    """[n, k] -> [ceil(n / across), across, ceil(k / along), along], a view where the sizes divide."""
    across, along = block
    n, k = x.shape
    if n % across or k % along:
        x = F.pad(x, (0, -k % along, 0, -n % across))
    blocks: Tensor = x.unflatten(1, (-1, along)).unflatten(0, (-1, across))
    return blocks


def from_blocks(x: Tensor, shape: tuple[int, int]) -> Tensor:
    """The way back to [n, k]."""
    return x.flatten(2, 3).flatten(0, 1)[: shape[0], : shape[1]]


def largest_in_blocks(x: Tensor, count: int) -> Tensor:
    """Where the `count` largest magnitudes of each block are, a bool tensor of x's shape [a, b, c, d]; of equal ones
    the first by position across, then along. NaN counts as the largest."""
    a, b, c, d = x.shape
    flat = x.abs().permute(0, 2, 1, 3).reshape(a, c, b * d)
    first = flat.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    mask = torch.zeros_like(flat, dtype=torch.bool).scatter(-1, first, True)
    return mask.view(a, c, b, d).permute(0, 2, 1, 3)
