"""Rounding an FP32 tensor to a narrow format, to nearest, ties to even, saturating.

The cast is arithmetic, not a dtype conversion: torch's own E4M3 cast saturates in some releases and gives NaN in
others, and its way back to FP32 is a scalar loop. Adding and subtracting 1.5 * 2^(e + 23 - M), where 2^e is the
value's own power of two (at least the smallest normal), makes the FP32 adder round to M mantissa bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from harness.precision.formats import FloatFormat

_EXPONENT, _SIGN = 0x7F800000, -0x80000000


def round_to(x: Tensor, fmt: FloatFormat) -> Tensor:
    """`x` (FP32, any shape) rounded to `fmt`: nearest even, subnormals kept, beyond the maximum saturated, NaN kept.

    The result is FP32 and lies on the grid of `fmt`; the sign of zero is that of `x`.
    """
    rounded = x.clamp(-fmt.max, fmt.max)
    bits = rounded.view(torch.int32)
    power = bits.bitwise_and(_EXPONENT).view(torch.float32)
    shift = power.clamp_(min=fmt.min_normal).mul_(1.5 * 2.0 ** (23 - fmt.mantissa_bits))
    sign = bits.bitwise_and(_SIGN)
    rounded.add_(shift).sub_(shift)
    bits.bitwise_or_(sign)  # what underflows to zero keeps its sign; torch.copysign is a scalar loop
    return rounded
