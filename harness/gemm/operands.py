"""Operands as scaled-product kernels want them: codes of a narrow type and decode scales, in plain PyTorch.

The same arithmetic as harness.precision's casts, but what comes out is packed for a kernel instead of carried in a wide
type; `dequantized` gives the values back, which tests and the GPU check hold against the emulation bit for bit.
Shapes: x is [rows, k], contraction last; sizes are multiples of the kernel's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from harness.precision.scales import power_of_two

E4M3_MAX = 448.0
E2M1_MAX = 6.0
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
Quantizer = Callable[[Tensor], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Operand:
    """One operand of a scaled product."""

    codes: Tensor
    """[rows, k] float8, or [rows, k / 2] of two packed E2M1 codes."""
    scales: tuple[Tensor, ...]
    """Decode scales, the finer level first: [], [rows, 1], [rows or rows/128, k/block]."""


def operand_of(parts: tuple[Tensor, ...]) -> Operand:
    """The operand that a quantiser's tensors make up; E8M0 is given its type here, which compilers do not know."""
    codes, *scales = parts
    typed = (s.view(torch.float8_e8m0fnu) if s.dtype == torch.uint8 else s for s in scales)
    return Operand(codes, tuple(typed))


def tensorwise(x: Tensor) -> tuple[Tensor, ...]:
    """E4M3 codes and the inverse of one scale 448 / amax."""
    return _scaled_codes(x.float(), _encode_scale(x.abs().amax()))


def rowwise(x: Tensor) -> tuple[Tensor, ...]:
    """E4M3 codes and inverse scales [rows, 1]."""
    return _scaled_codes(x.float(), _encode_scale(x.abs().amax(1, keepdim=True)))


def blockwise_1x128(x: Tensor) -> tuple[Tensor, ...]:
    """E4M3 codes and inverse scales [rows, k/128]."""
    rows, k = x.shape
    blocks = x.view(rows, k // 128, 128)
    codes, inverse = _scaled_codes(blocks.float(), _encode_scale(blocks.abs().amax(2, keepdim=True)))
    return codes.view(rows, k), inverse.view(rows, k // 128)


def blockwise_128x128(x: Tensor) -> tuple[Tensor, ...]:
    """E4M3 codes and inverse scales [rows/128, k/128]; rows need not be a multiple of 128."""
    rows, k = x.shape
    padded = functional.pad(x, (0, 0, 0, -rows % 128))
    blocks = padded.view(-1, 128, k // 128, 128)
    codes, inverse = _scaled_codes(blocks.float(), _encode_scale(blocks.abs().amax((1, 3), keepdim=True)))
    return codes.view(-1, k)[:rows], inverse.view(-1, k // 128)


def mxfp8(x: Tensor) -> tuple[Tensor, ...]:
    """E4M3 codes and E8M0 scales [rows, k/32] as bytes, each the smallest power of two that clips nothing."""
    rows, k = x.shape
    blocks = x.float().view(rows, k // 32, 32)
    bits = blocks.abs().amax(2, keepdim=True).view(torch.int32)
    # amax / 2^E <= 448 = 1.75 * 2^8: one more than floor(log2 amax) - 8 where the mantissa is above 1.75.
    exponent = (bits >> 23) - 127 - 8 + ((bits & 0x7FFFFF) > 0x600000)
    exponent = exponent.clamp(-127, 127)
    codes = (blocks * power_of_two(-exponent)).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return codes.view(rows, k), (exponent + 127).to(torch.uint8).view(rows, k // 32)


def nvfp4(x: Tensor) -> tuple[Tensor, ...]:
    """Packed E2M1 codes [rows, k/2], E4M3 scales [rows, k/16] and the tensor's FP32 decode scale []."""
    rows, k = x.shape
    blocks = x.float().view(rows, k // 16, 16)
    amax = blocks.abs().amax(2, keepdim=True)
    encode = _or_one(_over(E2M1_MAX * E4M3_MAX, amax.amax()))
    stored = ((amax / torch.full_like(amax, E2M1_MAX)) * encode).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)
    wide = stored.float()
    scaled = blocks * torch.where(wide > 0, encode / wide, torch.zeros_like(wide))
    codes = _e2m1_codes(scaled).view(rows, k)
    packed = codes[:, 0::2] | (codes[:, 1::2] << 4)
    return packed, stored.view(rows, k // 16), 1 / encode


QUANTIZERS: dict[str, tuple[Quantizer, Quantizer]] = {
    "fp8-tensorwise": (tensorwise, tensorwise),
    "fp8-rowwise": (rowwise, rowwise),
    "fp8-block": (blockwise_1x128, blockwise_128x128),
    "mxfp8": (mxfp8, mxfp8),
    "nvfp4": (nvfp4, nvfp4),
}
"""Kernel -> what makes its left and its right operand."""


def dequantized(operand: Operand) -> Tensor:
    """FP32 values [rows, k] that the operand stands for."""
    codes = operand.codes
    if codes.dtype == torch.uint8:
        table = torch.tensor([*E2M1_VALUES, *(-v for v in E2M1_VALUES)], device=codes.device)
        codes = table[torch.stack((codes & 15, codes >> 4), 2).flatten(1).long()]
        # Values of the two levels first, the tensor's factor last: the order the emulation multiplies in.
        return _spread(codes, operand.scales[0].float()) * operand.scales[1]
    scale = operand.scales[0]
    if scale.dtype == torch.float8_e8m0fnu:
        exponents = scale.view(torch.uint8).to(torch.int32) - 127
        scale = power_of_two(exponents)
    return _spread(codes.float(), scale)


def _spread(values: Tensor, scales: Tensor) -> Tensor:
    """values * scales, each scale over its block."""
    if scales.ndim < 2:
        return values * scales
    rows, k = values.shape
    across, along = 1 if scales.shape[0] == rows else 128, k // scales.shape[1]
    return values * scales.repeat_interleave(across, 0)[:rows].repeat_interleave(along, 1)


def _encode_scale(amax: Tensor) -> Tensor:
    return _or_one(_over(E4M3_MAX, amax.float())).clamp(2.0**-120, 2.0**120)


def _over(dividend: float, x: Tensor) -> Tensor:
    """dividend / x, rounded once: PyTorch may divide a number and a tensor by way of a reciprocal, which differs."""
    return torch.full_like(x, dividend) / x


def _or_one(scale: Tensor) -> Tensor:
    """1 where nothing or something not finite was to be scaled."""
    return torch.where(torch.isfinite(scale) & (scale > 0), scale, torch.ones_like(scale))


def _scaled_codes(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return (x * scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), 1 / scale


def _e2m1_codes(x: Tensor) -> Tensor:
    """4-bit codes, nearest with ties to the even code, as uint8."""
    a = x.abs()
    code = (
        (a > 0.25).to(torch.uint8) + (a >= 0.75) + (a > 1.25) + (a >= 1.75) + (a > 2.5) + (a >= 3.5) + (a > 5)
    )
    return code + torch.signbit(x).to(torch.uint8) * 8
