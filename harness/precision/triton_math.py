"""Device functions of the Triton kernels: the twin's rounding and scales, operation by operation.

Clamps are written with `where`, which keeps NaN; powers of two come from bits; divisions are correctly rounded. FMA
contraction is switched off where the kernels are launched.
"""

from __future__ import annotations

import triton
import triton.language as tl

NARROW, BITS, WHOLE, MXINT8 = 0, 1, 2, 3
"""Kinds of format: fewer than 8 exponent bits, FP32's exponent range, whole numbers, multiples of 2^-6."""
NEAREST, STOCHASTIC, HALF_AWAY = 0, 1, 2
SATURATE, INFINITY, NOT_A_NUMBER = 0, 1, 2
BLOCK, MX, NVFP4 = 0, 1, 2
FLOOR, UP, EVEN = 0, 1, 2


@triton.jit
def noise_bits(index, key0, key1):
    z = index.to(tl.uint32) ^ key0.to(tl.uint32)
    z = (z ^ (z >> 16)) * 0x7FEB352D
    z = z ^ (z >> 15) ^ key1.to(tl.uint32)
    z = z * 0x846CA68B
    return z ^ (z >> 16)


@triton.jit
def bits_of(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def float_of(bits):
    return bits.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def clamp(y, low, high):
    y = tl.where(y > high, high, y)
    return tl.where(y < low, low, y)


@triton.jit
def whole_part(magnitude, noise, ROUNDING: tl.constexpr):
    """Half away or stochastic, of a non-negative number."""
    whole = tl.floor(magnitude)
    remainder = magnitude - whole
    if ROUNDING == 2:  # noqa: SIM108
        up = remainder >= 0.5
    else:
        up = (noise >> 8).to(tl.float32) * 5.9604644775390625e-08 < remainder  # 2^-24
    return whole + tl.where(up, 1.0, 0.0)


@triton.jit
def round_narrow(
    y, noise, top_bits, limit_bits, min_normal_bits,
    MANTISSA: tl.constexpr, ROUNDING: tl.constexpr, OVERFLOW: tl.constexpr,
):  # fmt: skip
    limit = float_of(limit_bits)
    clamped = clamp(y, -limit, limit)
    bits = bits_of(clamped)
    power_bits = tl.maximum(bits & 0x7F800000, min_normal_bits)
    if ROUNDING == 0 and MANTISSA <= 21:
        shift = float_of(power_bits + ((23 - MANTISSA) << 23) + 0x00400000)  # 1.5 * 2^(e + 23 - M)
        rounded = (clamped + shift) - shift
    else:
        magnitude = float_of(bits & 0x7FFFFFFF) * float_of(0x7F000000 - power_bits + (MANTISSA << 23))
        if ROUNDING == 0:
            # magnitudes are below 2^24, where 2^23 and more are whole already
            whole = tl.where(magnitude < 8388608.0, (magnitude + 8388608.0) - 8388608.0, magnitude)
        else:
            whole = whole_part(magnitude, noise, ROUNDING)
        rounded = whole * float_of(power_bits - (MANTISSA << 23))
    rounded = float_of(bits_of(rounded) | (bits & -0x80000000))
    if OVERFLOW != 0:
        beyond = tl.abs(rounded) > float_of(top_bits)  # NaN is not
        special = 0x7FC00000 if OVERFLOW == 2 else 0x7F800000
        rounded = tl.where(beyond, float_of(special | (bits & -0x80000000)), rounded)
    return rounded


@triton.jit
def round_bits(y, noise, top_bits, MANTISSA: tl.constexpr, ROUNDING: tl.constexpr, OVERFLOW: tl.constexpr):
    bits = bits_of(y)
    magnitude = tl.minimum(bits & 0x7FFFFFFF, 0x7F800000)
    if MANTISSA < 23:
        if ROUNDING == 0:
            last = magnitude >> (23 - MANTISSA)
            odd = tl.minimum(last, 1) if MANTISSA == 0 else last & 1
            magnitude = magnitude + ((1 << (22 - MANTISSA)) - 1) + odd
        elif ROUNDING == 2:
            magnitude = magnitude + (1 << (22 - MANTISSA))
        else:
            magnitude = magnitude + (noise >> (9 + MANTISSA)).to(tl.int32)
        magnitude = magnitude & -(1 << (23 - MANTISSA))
    if OVERFLOW == 0:
        magnitude = tl.minimum(magnitude, top_bits)
    else:
        beyond = 0x7FC00000 if OVERFLOW == 2 else 0x7F800000
        magnitude = tl.where(magnitude > top_bits, beyond, magnitude)
    return tl.where(y != y, y, float_of(magnitude | (bits & -0x80000000)))


@triton.jit
def bf16_bits(y, EXACT: tl.constexpr):
    """A BF16 number's bits as int16, by nearest even unless the value is one (`EXACT`). Triton's interpreter loses
    subnormals in its own conversion."""
    shortened = y if EXACT else round_bits(y, y, tl.full((), 0x7F7F0000, tl.int32), 7, 0, 1)
    return tl.where(y != y, 0x7FC0, bits_of(shortened) >> 16).to(tl.int16)


@triton.jit
def round_whole(y, noise, maximum, ROUNDING: tl.constexpr):
    """Whole numbers from -maximum to maximum, below 2^22; zero is positive."""
    clamped = clamp(y, -maximum, maximum)
    if ROUNDING == 0:
        whole = (clamped + 12582912.0) - 12582912.0
    else:
        whole = whole_part(tl.abs(clamped), noise, ROUNDING)
        whole = tl.where(clamped < 0.0, -whole, whole)
    return tl.where(whole == 0.0, 0.0, whole)


@triton.jit
def round_any(
    y, noise, top_bits, limit_bits, min_normal_bits,
    KIND: tl.constexpr, MANTISSA: tl.constexpr, ROUNDING: tl.constexpr, OVERFLOW: tl.constexpr,
):  # fmt: skip
    """`top_bits` is the largest value as FP32 bits; of MXINT8 the largest whole number."""
    if KIND == 0:
        return round_narrow(y, noise, top_bits, limit_bits, min_normal_bits, MANTISSA, ROUNDING, OVERFLOW)
    elif KIND == 1:  # noqa: RET505  (Triton compiles the branch that is taken only in this form)
        return round_bits(y, noise, top_bits, MANTISSA, ROUNDING, OVERFLOW)
    elif KIND == 2:
        return round_whole(y, noise, float_of(top_bits), ROUNDING)
    else:
        return round_whole(y * 64.0, noise, float_of(top_bits), ROUNDING) * 0.015625


@triton.jit
def power_of_two(exponent):
    return float_of(tl.where(exponent > -127, (exponent + 127) << 23, 0x00400000))


@triton.jit
def block_scale(
    amax_bits, maximum, outer,
    KIND: tl.constexpr, SCALING: tl.constexpr, RULE: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    MANTISSA: tl.constexpr, EMAX: tl.constexpr, TOP_MANTISSA: tl.constexpr,
):  # fmt: skip
    """(encode, decode) of blocks with the bits of their largest magnitudes.

    `maximum`: what amax is brought to, the margin included (whole numbers: what the step divides).
    """
    amax = float_of(amax_bits)
    finite = amax_bits < 0x7F800000
    if SCALING == 1:
        small = amax < 7.888609052210118e-31  # 2^-100
        bits = bits_of(tl.where(small, amax * 1073741824.0, tl.where(finite, amax, 0.0)))
        if RULE == 2:
            bits = bits + (1 << (22 - MANTISSA))
        exponent = (bits >> 23) - (127 + EMAX)
        if RULE == 1:
            exponent = exponent + tl.where((bits & 0x7FFFFF) > TOP_MANTISSA, 1, 0)
        exponent = tl.where(small, exponent - 30, exponent)
        exponent = tl.minimum(tl.maximum(exponent, -127), 127)
        exponent = tl.where(amax_bits == 0, -127, exponent)
        encode = tl.where(finite, power_of_two(-exponent), float_of(tl.full((), 0x7FC00000, tl.int32)))
        decode = power_of_two(exponent)
    elif SCALING == 2:
        scaled = tl.div_rn(amax, tl.full(amax.shape, 6.0, tl.float32)) * outer
        top = tl.full((), 0x43E00000, tl.int32)  # E4M3: 448, and 2^-6
        decode = round_narrow(scaled, top, top, top, 0x3C800000, 3, 0, 0)
        quotient = tl.div_rn(tl.zeros(amax.shape, tl.float32) + outer, decode)
        encode = tl.where(decode > 0.0, quotient, 0.0)
    elif KIND == 2:
        one = tl.full(amax.shape, 1.0, tl.float32)
        decode = tl.div_rn(amax, one * maximum)
        usable = (amax_bits > 0) & (bits_of(decode) < 0x7F800000)
        decode = tl.where(
            usable, tl.where(decode < 1.1754943508222875e-38, 1.1754943508222875e-38, decode), 1.0
        )
        encode = tl.div_rn(one, decode)
        if POWER_OF_TWO:
            encode = float_of(bits_of(encode) & 0x7F800000)
            decode = tl.div_rn(one, encode)
    else:
        one = tl.full(amax.shape, 1.0, tl.float32)
        encode = tl.where((amax_bits > 0) & finite, tl.div_rn(one * maximum, amax), 1.0)
        if POWER_OF_TWO:
            encode = float_of(bits_of(encode) & 0x7F800000)
        encode = clamp(encode, 7.52316384526264e-37, 1.329227995784916e36)  # 2^-120 and 2^120
        decode = tl.div_rn(one, encode)
    return encode, decode


@triton.jit
def moments(x, scaled, rounded, restored, threshold):
    """Counts and sums of one tile: nonzero, clipped, flushed, signal, noise, all FP64."""
    nonzero = tl.where(x != 0.0, 1.0, 0.0).to(tl.float64)
    clipped = tl.where(tl.abs(scaled) > threshold, 1.0, 0.0).to(tl.float64)
    flushed = tl.where((rounded == 0.0) & (x != 0.0), 1.0, 0.0).to(tl.float64)
    wide = x.to(tl.float64)
    error = wide - restored.to(tl.float64)
    return nonzero, clipped, flushed, wide * wide, error * error
