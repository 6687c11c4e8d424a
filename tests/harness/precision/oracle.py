"""The casts once more, in NumPy, from the texts alone; nothing here comes from harness.precision.

Elements: every code of a format is decoded from its bits (OCP 8-bit floating point and Microscaling Formats 1.0; IEEE
754 for the wider ones), and a value goes to the nearest of them by search. Scales: FP32 arithmetic as the recipes
write it; powers of two by integer exponents (`math.frexp`), products with them in FP64, which is exact.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
F32 = np.float32

# name: (exponent bits, mantissa bits, what the top codes are)
FLOATS: dict[str, tuple[int, int, str]] = {
    "fp32": (8, 23, "ieee"), "tf32": (8, 10, "ieee"), "bf16": (8, 7, "ieee"), "fp16": (5, 10, "ieee"),
    "e4m3": (4, 3, "nan"), "e4m3-ieee": (4, 3, "ieee"), "e5m2": (5, 2, "ieee"),
    "e3m2": (3, 2, "none"), "e2m3": (2, 3, "none"), "e2m1": (2, 1, "none"), "e1m2": (1, 2, "none"),
    "e3m0": (3, 0, "none"), "m7": (8, 7, "ieee"), "m3": (8, 3, "ieee"), "m0": (8, 0, "ieee"),
    "e5m3": (5, 3, "ieee"), "e4m1": (4, 1, "none"), "e2m2": (2, 2, "none"),
}  # fmt: skip
INTS = {"int8": 127, "int4": 7, "int8-asym": 255, "int4-asym": 15}

NF4_PUBLISHED = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip
"""Appendix E of QLoRA (arXiv 2305.14314)."""


@functools.cache
def grid(name: str) -> Array:
    """Every finite value of a format that is not negative, in rising order, FP64."""
    exponent_bits, mantissa_bits, specials = FLOATS[name]
    top = (1 << exponent_bits) - 1
    bias = (1 << (exponent_bits - 1)) - 1
    codes = np.arange(1 << (exponent_bits + mantissa_bits))
    exponent, mantissa = codes >> mantissa_bits, codes & ((1 << mantissa_bits) - 1)
    finite = {"ieee": exponent != top, "nan": codes != codes[-1], "none": codes >= 0}[specials]
    subnormal = exponent == 0
    significand = np.where(subnormal, 0, 1 << mantissa_bits) + mantissa
    values = np.ldexp(significand.astype(float), np.where(subnormal, 1, exponent) - bias - mantissa_bits)
    return values[finite]


def nearest(x: Array, name: str, ties: str = "even", overflow: str = "saturate") -> Array:
    """`x` (any real array) on the grid of a float format, FP64; NaN and the sign of zero are kept."""
    if name == "fp32":
        return x.astype(F32).astype(float)
    x = x.astype(float)
    points, specials = grid(name), FLOATS[name][2]
    step = 2.0 ** (math.frexp(points[-1])[1] - 1 - FLOATS[name][1])  # spacing of the top binade
    points = np.append(points, points[-1] + step)  # where the next code would be
    magnitude = np.minimum(np.abs(x), points[-1])
    high = np.clip(np.searchsorted(points, magnitude), 1, len(points) - 1)
    below, above = points[high - 1], points[high]
    odd = np.floor(below / (above - below)) % 2 == 1  # counted in steps of this interval
    twice = 2 * magnitude - (below + above)
    up = (twice > 0) | ((twice == 0) & (odd if ties == "even" else True))
    result = np.where(up, above, below)
    over = result == points[-1]
    limit = points[-2]
    if overflow == "special":
        limit = {"ieee": math.inf, "nan": math.nan, "none": limit}[specials]
    result = np.copysign(np.where(over, limit, result), x)
    return np.where(np.isnan(x), np.nan, result)


def scale_to(top: float, amax: Array, margin: int = 0, power_of_two: bool = False) -> Array:
    """The encode scale max / 2^margin / amax in FP32; 1 where amax is 0 or not finite."""
    with np.errstate(all="ignore"):
        scale = np.where((amax > 0) & np.isfinite(amax), F32(top / 2.0**margin) / amax.astype(F32), F32(1))
    if power_of_two:
        # An infinite quotient is clamped like the largest finite ones.
        finite = np.minimum(scale, np.finfo(F32).max).astype(float)
        scale = np.ldexp(1.0, np.frexp(finite)[1] - 1)
    return np.clip(scale, 2.0**-120, 2.0**120).astype(F32)


def current(x: Array, name: str, *, amax: Array | None = None, **options: Any) -> Array:
    """Per-tensor scaling (or with `amax` given, per whatever its shape says), dequantised FP32."""
    how = {key: options.pop(key) for key in ("ties", "overflow") if key in options}
    x = x.astype(F32)
    amax = largest(x) if amax is None else amax
    scale = scale_to(grid(name)[-1], amax, **options)
    with np.errstate(all="ignore"):
        return nearest(x * scale, name, **how).astype(F32) * (F32(1) / scale)


def row(x: Array, name: str, **options: Any) -> Array:
    """One scale a row of [rows, cols]."""
    return current(x, name, amax=largest(x.astype(F32), axis=1), **options)


def largest(x: Array, axis: int | None = None) -> Array:
    """max |x|, kept as an axis of length 1; 0 for nothing."""
    keep = np.abs(x).max(axis=axis, keepdims=True, initial=0)
    return keep.astype(F32) if axis is not None else keep.reshape(()).astype(F32)


def by_block(x: Array, shape: tuple[int, int], function: Callable[[Array], Array]) -> Array:
    """`function` on each block of [across, along], the last of a row or column being what is left."""
    x = x.astype(F32)
    result = np.empty(x.shape, F32)
    for i in range(0, x.shape[0], shape[0]):
        for j in range(0, x.shape[1], shape[1]):
            place = slice(i, i + shape[0]), slice(j, j + shape[1])
            result[place] = function(x[place])
    return result


def block(x: Array, name: str, shape: tuple[int, int], keep_top: int = 0, **options: Any) -> Array:
    """FP32 or power-of-two scales per block; the `keep_top` largest of each pass by the cast."""

    def one(part: Array) -> Array:
        flat = np.abs(part).reshape(-1)
        nan = np.isnan(flat)  # counts as larger than anything; of equals the first is kept
        kept = np.lexsort((np.arange(flat.size), -np.where(nan, 0, flat), ~nan))[:keep_top]
        rest = part.copy().reshape(-1)
        rest[kept] = 0
        done = current(rest, name, **options)
        done[kept] = part.reshape(-1)[kept]
        return done.reshape(part.shape)

    return by_block(x, shape, one)


def mx_exponent(amax: float, name: str, rule: str) -> int:
    """Exponent of the shared scale (OCP MX 1.0, section 6.3 for floor), within E8M0's -127 to 127."""
    top = 127 / 64 if name == "int8" else float(grid(name)[-1])
    mantissa_bits = 6 if name == "int8" else FLOATS[name][1]
    if amax == 0:
        return -127
    if rule == "up":
        exponent = math.frexp(amax)[1] - math.frexp(top)[1] - 1
        while math.ldexp(amax, -exponent) > top:
            exponent += 1
    else:
        if rule == "even":
            fraction, power = math.frexp(amax)  # 0.5 <= fraction < 1
            amax = math.ldexp(round(math.ldexp(fraction, mantissa_bits + 1)), power - mantissa_bits - 1)
        exponent = math.frexp(amax)[1] - math.frexp(top)[1]
    return max(-127, min(127, exponent))


def mx(
    x: Array, name: str, rule: str = "floor", shape: tuple[int, int] = (1, 32), ties: str = "even"
) -> Array:
    """MX: elements under one power of two a block."""

    def one(part: Array) -> Array:
        if not np.isfinite(part).all():
            return np.full(part.shape, np.nan, F32)
        exponent = mx_exponent(float(np.abs(part).max()), name, rule)
        scaled = np.ldexp(part.astype(float), -exponent)
        if name == "int8":
            elements = np.clip(np.round(scaled * 64), -127, 127) / 64 + 0.0  # whole numbers have one zero
        else:
            elements = nearest(scaled, name, ties)
        return np.ldexp(elements, exponent).astype(F32)

    return by_block(x, shape, one)


def nvfp4(x: Array, shape: tuple[int, int] = (1, 16)) -> Array:
    """NVFP4 (arXiv 2509.25149, appendix B): E4M3 scales per 16 under one FP32 scale a tensor."""
    x = x.astype(F32)
    amax = largest(x)
    with np.errstate(all="ignore"):
        outer = F32(6 * 448) / amax if np.isfinite(amax) and amax > 0 else F32(1)
        outer = np.clip(outer, F32(2.0**-118), F32(2.0**118))
        inverse = F32(1) / outer

        def one(part: Array) -> Array:
            share = (largest(part) / F32(6)) * outer
            stored = nearest(np.asarray(share), "e4m3").astype(F32)
            encode = outer / stored if stored > 0 else F32(0)
            return nearest(part * encode, "e2m1").astype(F32) * stored * inverse

        return by_block(x, shape, one)


def step_of(span: Array, top: int) -> tuple[Array, bool]:
    """(step, whether the data gave one): at least 2^-126, so that its reciprocal is finite."""
    with np.errstate(all="ignore"):
        step = F32(span / F32(top))
    usable = bool(span > 0) and bool(np.isfinite(step))
    return (max(step, F32(2.0**-126)) if usable else F32(1)), usable


def integers(x: Array, name: str, shape: tuple[int, int] | None = None, margin: int = 0) -> Array:
    """Symmetric or asymmetric integers, one scale (and zero point) per block; no shape: per tensor."""
    top, symmetric = INTS[name], not name.endswith("asym")

    def one(part: Array) -> Array:
        low, high = part.min(initial=0), part.max(initial=0)
        span = largest(part) * F32(2.0**margin) if symmetric else high - low
        step, usable = step_of(span, top)
        with np.errstate(all="ignore"):
            codes = np.round(part * (F32(1) / step))
            if symmetric:
                return (np.clip(codes, -top, top).astype(F32) + F32(0)) * step
            zero = np.clip(np.round(-low / step), 0, top) if usable else F32(0)
            return (np.clip(codes + zero, 0, top) - zero).astype(F32) * step

    return by_block(x, shape or x.shape, one) if x.size else x.astype(F32)


def nf4(x: Array, size: int) -> Array:
    """The nearest of the sixteen published levels under the block's largest magnitude, a tie to the lower."""
    levels = np.array(NF4_PUBLISHED)

    def one(part: Array) -> Array:
        step, _ = step_of(largest(part), 1)
        with np.errstate(all="ignore"):
            unit = (part * (F32(1) / step)).astype(float)
        unit = np.clip(unit, -1, 1)  # infinities: beyond the outer levels nothing changes
        index = np.abs(unit[..., None] - levels).argmin(axis=-1)  # the first of equals is the lower level
        return np.where(np.isnan(unit), np.nan, levels[index]).astype(F32) * step

    return by_block(x, (1, size), one)


def noise_bits(seed: int, count: int) -> Array:
    """32 bits an element, as harness/precision/noise.py describes them."""
    m64 = (1 << 64) - 1
    z = (seed + 0x9E3779B97F4A7C15) & m64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & m64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & m64
    z ^= z >> 31
    u = np.arange(count, dtype=np.uint32) ^ np.uint32(z & 0xFFFFFFFF)
    u = (u ^ (u >> np.uint32(16))) * np.uint32(0x7FEB352D)
    u = u ^ (u >> np.uint32(15)) ^ np.uint32(z >> 32)
    u = u * np.uint32(0x846CA68B)
    return u ^ (u >> np.uint32(16))


def stochastic(x: Array, name: str, seed: int) -> Array:
    """`x` (finite) to one of its neighbours, up in magnitude with the probability of the remainder; saturating."""
    points = grid(name)
    magnitude = np.minimum(np.abs(x).astype(float), points[-1])
    high = np.clip(np.searchsorted(points, magnitude, side="right"), 1, len(points) - 1)
    below, above = points[high - 1], points[high]
    share = (magnitude - below) / (above - below)
    u = (noise_bits(seed, x.size) >> np.uint32(8)).reshape(x.shape) / 2.0**24
    return np.copysign(np.where(u < share, above, below), x)


def power_of_two(x: Array) -> Array:
    """E8M0 as ml_dtypes casts to it: a tie goes up, NaN for what is not positive and for what rounds beyond 2^127."""
    with np.errstate(all="ignore"):
        x = x.astype(float)
        fraction, exponent = np.frexp(np.where(np.isfinite(x) & (x > 0), x, 1))
        exponent = exponent - 1 + (fraction >= 0.75)
        # Between 2^-127 and 2^-126 ml_dtypes always goes up.
        exponent = np.where((x > 2.0**-127) & (x < 2.0**-126), -126, np.maximum(exponent, -127))
        return np.where((x > 0) & (exponent <= 127) & np.isfinite(x), np.ldexp(1.0, exponent), np.nan)
