"""The two Triton kernels of the cast: under one scale per tensor or row, and under a scale per block."""

from __future__ import annotations

import triton
import triton.language as tl

from harness.precision import triton_math as device


@triton.jit
def scaled_kernel(
    x, out, encode, inverse, amax, sums, rows, cols, row_stride, col_stride, encode_row, encode_col, key0, key1,
    top_bits, limit_bits, min_normal_bits, threshold,
    KIND: tl.constexpr, MANTISSA: tl.constexpr, ROUNDING: tl.constexpr, OVERFLOW: tl.constexpr,
    FACTOR: tl.constexpr, AMAX: tl.constexpr, COLLECT: tl.constexpr, BF16: tl.constexpr, EXACT: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    col = (tl.program_id(1) * COLS + tl.arange(0, COLS))[None, :].to(tl.int64)
    inside = (row < rows) & (col < cols)
    value = tl.load(x + row * row_stride + col * col_stride, mask=inside, other=0.0).to(tl.float32)
    place = row * cols + col
    factor = tl.load(encode + row * encode_row + col * encode_col, mask=inside, other=1.0)
    scaled = value * factor
    noise = device.noise_bits(place, key0, key1) if ROUNDING == 1 else place
    rounded = device.round_any(
        scaled, noise, top_bits, limit_bits, min_normal_bits, KIND, MANTISSA, ROUNDING, OVERFLOW
    )
    if FACTOR or COLLECT:
        restored = rounded * tl.load(inverse + row * encode_row + col * encode_col, mask=inside, other=1.0)
    else:
        restored = rounded
    result = restored if FACTOR else rounded
    if BF16:
        result = device.bf16_bits(result, EXACT)
    tl.store(out + place, result, mask=inside)
    if AMAX:
        magnitude = device.bits_of(value) & 0x7FFFFFFF
        tl.atomic_max(amax, tl.max(tl.max(magnitude, axis=1), axis=0))
    if COLLECT:
        program = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
        _store_moments(sums + program * 5, value, scaled, rounded, restored, threshold)


@triton.jit
def _store_moments(sums, value, scaled, rounded, restored, threshold):
    nonzero, clipped, flushed, signal, noise = device.moments(value, scaled, rounded, restored, threshold)
    tl.store(sums, tl.sum(tl.ravel(nonzero), axis=0))
    tl.store(sums + 1, tl.sum(tl.ravel(clipped), axis=0))
    tl.store(sums + 2, tl.sum(tl.ravel(flushed), axis=0))
    tl.store(sums + 3, tl.sum(tl.ravel(signal), axis=0))
    tl.store(sums + 4, tl.sum(tl.ravel(noise), axis=0))


@triton.jit
def block_kernel(
    x, out, outer, inverse, amax, sums, n, k, n_stride, k_stride, n_place, k_place, key0, key1,
    top_bits, limit_bits, min_normal_bits, threshold, maximum,
    KIND: tl.constexpr, MANTISSA: tl.constexpr, ROUNDING: tl.constexpr, OVERFLOW: tl.constexpr,
    SCALING: tl.constexpr, RULE: tl.constexpr, POWER_OF_TWO: tl.constexpr, EMAX: tl.constexpr,
    TOP_MANTISSA: tl.constexpr, ACROSS: tl.constexpr, ALONG: tl.constexpr, FACTOR: tl.constexpr, AMAX: tl.constexpr,
    COLLECT: tl.constexpr, BF16: tl.constexpr, EXACT: tl.constexpr,
    A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """A tile of A x C blocks; a block lies in B x D places (powers of two) of which ACROSS x ALONG are its own."""
    a, b = tl.arange(0, A)[:, None, None, None], tl.arange(0, B)[None, :, None, None]
    c, d = tl.arange(0, C)[None, None, :, None], tl.arange(0, D)[None, None, None, :]
    row = (tl.program_id(0) * A + a).to(tl.int64) * ACROSS + b
    col = (tl.program_id(1) * C + c).to(tl.int64) * ALONG + d
    inside = (row < n) & (b < ACROSS) & (col < k) & (d < ALONG)
    value = tl.load(x + row * n_stride + col * k_stride, mask=inside, other=0.0).to(tl.float32)
    place = row * n_place + col * k_place
    magnitude = device.bits_of(value) & 0x7FFFFFFF
    block_amax = tl.max(tl.max(magnitude, axis=3, keep_dims=True), axis=1, keep_dims=True)
    outer_scale = tl.load(outer)
    encode, decode = device.block_scale(
        block_amax, maximum, outer_scale, KIND, SCALING, RULE, POWER_OF_TWO, MANTISSA, EMAX, TOP_MANTISSA
    )
    scaled = value * encode
    noise = device.noise_bits(place, key0, key1) if ROUNDING == 1 else place
    rounded = device.round_any(
        scaled, noise, top_bits, limit_bits, min_normal_bits, KIND, MANTISSA, ROUNDING, OVERFLOW
    )
    values = rounded * decode
    restored = values * tl.load(inverse) if SCALING == 2 else values
    result = restored if FACTOR else values
    if BF16:
        result = device.bf16_bits(result, EXACT)
    tl.store(out + place, result, mask=inside)
    if AMAX:
        tl.atomic_max(amax, tl.max(tl.ravel(block_amax), axis=0))
    if COLLECT:
        program = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
        _store_moments(sums + program * 5, value, scaled, rounded, restored, threshold)
