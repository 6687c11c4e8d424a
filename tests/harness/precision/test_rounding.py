"""Rounding against each format's enumerated values, against ml_dtypes bit for bit, and against NumPy's FP64."""

from __future__ import annotations

from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness.precision.formats import NF4, FloatFormat, find_format
from harness.precision.rounding import (
    Overflow,
    Rounding,
    clip_threshold,
    largest,
    level_edges,
    round_level,
    round_to,
    round_whole,
)

from .conftest import DTYPES, MAXIMA, Array, cast

ENUMERATED = (
    "e4m3", "e5m2", "e4m3-ieee", "e3m2", "e2m3", "e2m1", "e1m2", "e3m0", "e4m1", "e5m3", "e6m1", "e7m4", "e2m7-nan",
    "fp16", "bf16", "tf32", "m0", "m3", "m7", "e8m2-nan",
)  # fmt: skip
WITH_DTYPE = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e4m3-ieee": ml_dtypes.float8_e4m3,
    "e5m2": ml_dtypes.float8_e5m2,
    "e3m4": ml_dtypes.float8_e3m4,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
    "bf16": ml_dtypes.bfloat16,
    "fp16": np.float16,
    "e8m0": ml_dtypes.float8_e8m0fnu,
}
NO_NAN = ("e3m2", "e2m3", "e2m1")


def float_format(name: str) -> FloatFormat:
    fmt = find_format(name)
    assert isinstance(fmt, FloatFormat)
    return fmt


def rounded(
    x: Array,
    name: str,
    rounding: Rounding = "nearest",
    overflow: Overflow = "saturate",
    noise: Array | None = None,
) -> Array:
    bits = None if noise is None else torch.from_numpy(noise)
    given = torch.from_numpy(np.asarray(x, dtype=np.float32))
    return round_to(given, float_format(name), rounding, overflow, bits).numpy()


def assert_same_bits(got: Array, wanted: Array, x: Array) -> None:
    """Equal bit patterns, so the sign of zero counts; any NaN equals any NaN."""
    wanted = wanted.astype(np.float32)
    nan = np.isnan(wanted)
    assert np.array_equal(np.isnan(got), nan)
    differ = np.flatnonzero((got.view(np.int32) != wanted.view(np.int32)) & ~nan)
    assert not differ.size, [(x[i], got[i], wanted[i]) for i in differ[:5]]


def points(name: str) -> Array:
    """The format's non-negative values that FP32 holds, in order, FP64."""
    found = np.array([v for v in float_format(name).magnitudes() if v < 2.0**128])
    assert np.all(np.diff(found) > 0)
    return found


def patterns(count: int, seed: int = 0) -> Array:
    """FP32 numbers of random bits: all magnitudes alike, subnormals, infinities and NaNs among them."""
    x = np.random.default_rng(seed).integers(0, 2**32, count, dtype=np.uint32).view(np.float32)
    assert np.isnan(x).any()
    assert ((x != 0) & (np.abs(x) < 2.0**-126)).any()
    return x


def within(name: str, count: int, seed: int = 1) -> Array:
    """FP32 numbers of both signs, spread evenly over the format's binades and a little beyond."""
    fmt, rng = float_format(name), np.random.default_rng(seed)
    low = max(np.log2(fmt.min_positive) - 3, -148)
    high = min(np.log2(largest(fmt)) + 1, 127.9)
    return (rng.choice([-1.0, 1.0], count) * 2 ** rng.uniform(low, high, count)).astype(np.float32)


def nearest_by_search(x: Array, grid: Array, ties: str) -> Array:
    """Nearest grid value of |x|, saturating. Of two as near the one with the even index, or the larger one."""
    magnitude = np.minimum(np.abs(x.astype(np.float64)), grid[-1])
    above = np.clip(np.searchsorted(grid, magnitude), 1, len(grid) - 1)
    low, high = grid[above - 1], grid[above]
    below = magnitude - low
    to_high = high - magnitude
    even = above % 2 == 0 if ties == "even" else np.full(above.shape, True)
    return np.copysign(np.where((to_high < below) | ((to_high == below) & even), high, low), x)


@pytest.mark.parametrize("name", ENUMERATED)
@pytest.mark.parametrize("rounding", ["nearest", "half_away"])
def test_nearest_of_all_values(name: str, rounding: Rounding) -> None:
    """The values, the middles between neighbours, their FP32 neighbours, and random magnitudes."""
    grid = points(name)
    some = grid if len(grid) < 40_000 else grid[np.random.default_rng(0).integers(1, len(grid) - 1, 40_000)]
    middles = ((grid[:-1] + grid[1:]) / 2)[:40_000].astype(np.float32)
    with np.errstate(over="ignore"):
        near = [np.nextafter(middles, np.float32(end)) for end in (0, np.inf)]
    x = np.concatenate([some.astype(np.float32), middles, *near])
    x = np.concatenate([x, -x, within(name, 200_000)])
    if rounding == "half_away":
        wanted = nearest_by_search(x, grid, "up")
    elif (
        float_format(name).mantissa_bits == 0
    ):  # one-digit significands: ties go up, but for the one with zero
        wanted = nearest_by_search(x, grid, "up")
        wanted[np.abs(x) == grid[1] / 2] = 0
        wanted = np.copysign(wanted, x)
    else:
        wanted = nearest_by_search(x, grid, "even")
    assert_same_bits(rounded(x, name, rounding), wanted, x)


@pytest.mark.parametrize("name", ["e5m21", "e5m22", "e5m23", "e7m23", "e6m20", "m20", "m22"])
def test_long_mantissas(name: str) -> None:
    """Formats too fine to list, against FP64: x over its quantum, rounded by NumPy."""
    fmt = float_format(name)
    x = within(name, 200_000)
    magnitude = np.abs(x.astype(np.float64))
    exponent = np.maximum(np.frexp(magnitude)[1] - 1, fmt.min_exponent)
    quantum = 2.0 ** (exponent - fmt.mantissa_bits)
    wanted = np.copysign(np.minimum(np.round(magnitude / quantum) * quantum, largest(fmt)), x)
    assert_same_bits(rounded(x, name), wanted, x)


def test_fp32_stays() -> None:
    x = patterns(100_000)
    saturated = np.clip(x, -np.finfo(np.float32).max, np.finfo(np.float32).max)
    assert_same_bits(rounded(x, "fp32"), saturated, x)
    assert_same_bits(rounded(x, "fp32", overflow="special"), x, x)


@pytest.mark.parametrize("name", WITH_DTYPE)
def test_special_overflow_is_the_cast_of_ml_dtypes(name: str) -> None:
    """E8M0 too: zero and negative numbers are NaN there, and below 2^-126 it rounds up."""
    x = np.concatenate(
        [patterns(1_000_000), within(name, 300_000) if name != "e8m0" else patterns(300_000, 1)]
    )
    if name in NO_NAN:
        x = x[~np.isnan(x)]
    with np.errstate(all="ignore"):
        wanted = x.astype(WITH_DTYPE[name]).astype(np.float32)
    assert_same_bits(rounded(x, name, overflow="special"), wanted, x)


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
@pytest.mark.parametrize("carrier", [ml_dtypes.bfloat16, np.float16])
def test_every_16_bit_input(name: str, carrier: type) -> None:
    x = np.arange(2**16, dtype=np.uint16).view(carrier).astype(np.float32)
    assert_same_bits(rounded(x, name), cast(x, name), x)


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_beyond_the_maximum_saturates(name: str) -> None:
    top = np.float32(MAXIMA[name])
    above = np.array([np.nextafter(top, np.float32(np.inf)), top * 1.03, top * 1.07, 2 * top, 3e38, np.inf])
    assert np.array_equal(rounded(np.concatenate([above, -above]), name), np.repeat([top, -top], len(above)))


def test_special_overflow_is_decided_after_rounding() -> None:
    """E4M3: 464 is the tie between 448 and the 480 it lacks; BF16 and FP32's maximum."""
    assert rounded(np.array([464.0, -464.0]), "e4m3", overflow="special").tolist() == [448, -448]
    assert np.isnan(rounded(np.array([464.1, -np.inf]), "e4m3", overflow="special")).all()
    assert rounded(np.array([61439.0, 61440.0, -1e9]), "e5m2", overflow="special").tolist() == [
        57344, np.inf, -np.inf,
    ]  # fmt: skip
    assert rounded(np.array([3.4e38, -3.4e38]), "bf16", overflow="special").tolist() == [np.inf, -np.inf]
    assert rounded(np.array([3.4e38]), "bf16").item() == largest(float_format("bf16"))
    assert rounded(np.array([100.0, np.inf]), "e2m1", overflow="special").tolist() == [6, 6]


@pytest.mark.parametrize("rounding", ["nearest", "half_away", "stochastic"])
@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e2m1", "bf16", "tf32", "fp16", "m3"])
def test_specials_and_the_sign_of_zero(name: str, rounding: Rounding) -> None:
    x = np.array([0.0, -0.0, np.nan, -1e-45, 1e-45, np.inf], dtype=np.float32)
    got = rounded(x, name, rounding, noise=np.full(6, 2**31 - 1, dtype=np.int32))
    assert np.isnan(got[2])
    assert got[5] == largest(float_format(name))
    assert np.array_equal(np.signbit(got[[0, 1, 3, 4]]), [False, True, True, False])
    assert np.all(got[[0, 1]] == 0)


def test_e8m0_by_hand() -> None:
    x = np.array([0.0, -1.0, 1.0, 1.49, 1.5, 0.75, 2.0**-149, 2.0**-127, 3.4e38, np.inf, np.nan])
    wanted = [np.nan, np.nan, 1, 1, 2, 1, 2.0**-127, 2.0**-127, 2.0**127, 2.0**127, np.nan]
    assert np.array_equal(rounded(x, "e8m0"), np.array(wanted, dtype=np.float32), equal_nan=True)
    away = rounded(np.array([2.0**-127 * 1.4, 2.0**-127 * 1.5]), "e8m0", "half_away")
    assert away.tolist() == [2.0**-127, 2.0**-126]


def test_stochastic_needs_bits() -> None:
    for name in ("e4m3", "bf16"):
        with pytest.raises(ValueError, match="random bits"):
            rounded(np.ones(3), name, "stochastic")


@pytest.mark.parametrize("name", ["e4m3", "e2m1", "fp16", "bf16", "tf32"])
def test_stochastic_takes_a_neighbour(name: str) -> None:
    """A little above a value, all-zero and all-one bits give the two neighbours; the values themselves stay."""
    integer = float_format(name).exponent_bits == 8  # there the bits are added, elsewhere compared
    grid = points(name)
    if integer:
        grid = grid[(grid > 2.0**-100) & (grid < 2.0**100)]
    x = (grid[:-1] + np.diff(grid) * 2.0**-10).astype(np.float32)
    zeros, ones = (np.full(len(x), bits, dtype=np.int32) for bits in (0, -1))
    up, down = (ones, zeros) if integer else (zeros, ones)
    assert np.array_equal(rounded(x, name, "stochastic", noise=up), grid[1:].astype(np.float32))
    assert np.array_equal(rounded(x, name, "stochastic", noise=down), grid[:-1].astype(np.float32))
    for bits in (0, -1, 12345):
        noise = np.full(len(grid), bits, dtype=np.int32)
        assert np.array_equal(rounded(grid, name, "stochastic", noise=noise), grid.astype(np.float32))


@pytest.mark.parametrize("name", ENUMERATED)
def test_input_is_left_alone_and_any_shape_goes(name: str) -> None:
    x = torch.linspace(-3, 3, 24).view(2, 3, 4).transpose(0, 2)
    before = x.clone()
    y = round_to(x, float_format(name))
    assert torch.equal(x, before)
    assert torch.equal(y, round_to(x.contiguous(), float_format(name)))
    assert round_to(torch.tensor(0.3), float_format(name)).shape == ()
    assert round_to(torch.empty(0), float_format(name)).shape == (0,)
    expanded = round_to(torch.tensor(0.3).expand(2, 3), float_format(name))
    assert torch.equal(expanded, round_to(torch.full((2, 3), 0.3), float_format(name)))


@pytest.mark.parametrize("name", DTYPES)
def test_the_grid_is_exact_in_bf16(name: str) -> None:
    """What lets the emulated GEMM run in BF16."""
    grid = torch.from_numpy(points(name)).float()
    assert torch.equal(grid.bfloat16().float(), grid)


@given(st.lists(st.floats(width=32), min_size=1, max_size=20), st.sampled_from(ENUMERATED))
def test_rounding_is_idempotent_odd_and_monotonic(values: list[float], name: str) -> None:
    x = np.array(values, dtype=np.float32)
    once = rounded(x, name)
    assert_same_bits(rounded(once, name), once, x)
    assert_same_bits(rounded(-x, name), -once, x)
    ordered = rounded(np.sort(x[~np.isnan(x)]), name)
    assert np.all(np.diff(ordered) >= 0)


def test_whole_numbers() -> None:
    y = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 0.49999997, -0.2, 7.0])
    nearest, away = round_whole(y), round_whole(y, "half_away")
    assert nearest.tolist() == [0, 2, 2, 0, -2, 0, 0, 7]
    assert away.tolist() == [1, 2, 3, -1, -2, 0, 0, 7]
    assert not torch.signbit(nearest[nearest == 0]).any()
    assert round_whole(torch.tensor([torch.nan])).isnan().all()


def test_levels_of_nf4() -> None:
    """Each level, each middle (to the lower level) and its FP32 neighbour above, by exact comparison in FP64."""
    levels = np.array(NF4.levels)
    edges = np.array(level_edges(NF4), dtype=np.float32)
    middles = (levels[:-1] + levels[1:]) / 2
    above = np.nextafter(edges, np.float32(2))
    assert np.all(edges <= middles)
    assert np.all(above.astype(np.float64) > middles)
    x = np.concatenate(
        [levels.astype(np.float32), edges, above, np.array([-3, 3, 0, np.inf], dtype=np.float32)]
    )
    wanted = np.concatenate([levels, levels[:-1], levels[1:], [-1, 1, 0, 1]]).astype(np.float32)
    assert np.array_equal(round_level(torch.from_numpy(x), NF4).numpy(), wanted)
    assert round_level(torch.tensor([torch.nan]), NF4).isnan().all()


def test_clip_threshold_is_above_what_a_scale_gives() -> None:
    for maximum in (448.0, 57344.0, 6.0, 127.0, 1.0):
        top = np.float32(maximum)
        edge = clip_threshold(maximum)
        assert np.float32(edge) == edge
        assert np.nextafter(top, np.float32(np.inf)) <= edge < maximum * (1 + 2.0**-21)
    assert clip_threshold(largest(float_format("bf16"))) >= largest(float_format("bf16"))


def test_largest_is_what_fp32_holds() -> None:
    for a, b in pairwise(("e4m3", "e5m2", "fp16")):
        assert largest(float_format(a)) < largest(float_format(b))
    assert largest(float_format("e8m2-nan")) == 1.75 * 2.0**127 < float_format("e8m2-nan").max
