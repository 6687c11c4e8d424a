"""round_to is bit-exact against ml_dtypes: every BF16 and FP16 value, a million FP32 ones, every tie."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from harness.precision.formats import FORMATS
from harness.precision.rounding import round_to

from .conftest import DTYPES, MAXIMA, Array, cast

pytestmark = pytest.mark.parametrize("name", FORMATS)


def rounded(x: Array, name: str) -> Array:
    return round_to(torch.from_numpy(x.astype(np.float32)), FORMATS[name]).numpy()


def assert_same_bits(got: Array, wanted: Array, x: Array) -> None:
    """Equal bit patterns, so the sign of zero counts; any NaN equals any NaN."""
    nan = np.isnan(wanted)
    assert np.array_equal(np.isnan(got), nan)
    differ = np.flatnonzero((got.view(np.int32) != wanted.view(np.int32)) & ~nan)
    assert not differ.size, [(x[i], got[i], wanted[i]) for i in differ[:5]]


def grid(name: str) -> Array:
    """The format's non-negative finite values in order, FP32."""
    codes = np.arange(128, dtype=np.uint8).view(DTYPES[name]).astype(np.float32)
    return np.sort(codes[np.isfinite(codes)])


@pytest.mark.parametrize("carrier", [ml_dtypes.bfloat16, np.float16])
def test_every_16_bit_input(name: str, carrier: type) -> None:
    x = np.arange(2**16, dtype=np.uint16).view(carrier).astype(np.float32)
    assert_same_bits(rounded(x, name), cast(x, name), x)


def test_random_fp32_bit_patterns(name: str) -> None:
    """All magnitudes alike: FP32 subnormals, infinities and NaNs among them."""
    x = np.random.default_rng(0).integers(0, 2**32, 1_000_000, dtype=np.uint32).view(np.float32)
    assert np.isnan(x).any()
    assert ((x != 0) & (np.abs(x) < 2.0**-126)).any()
    assert_same_bits(rounded(x, name), cast(x, name), x)


def test_random_fp32_within_the_range_of_the_format(name: str) -> None:
    rng = np.random.default_rng(1)
    top = np.log2(MAXIMA[name]) + 1
    bottom = np.log2(FORMATS[name].min_subnormal) - 3
    x = (rng.choice([-1, 1], 1_000_000) * 2 ** rng.uniform(bottom, top, 1_000_000)).astype(np.float32)
    assert_same_bits(rounded(x, name), cast(x, name), x)


def test_every_tie_and_its_neighbours(name: str) -> None:
    """Halfway between each pair of neighbours (zero and the smallest subnormal too): to the even one."""
    points = grid(name)
    ties = (points[:-1] + points[1:]) / 2
    assert np.array_equal(ties.astype(np.float64) * 2, points[:-1].astype(np.float64) + points[1:])
    low, high = np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(np.inf))
    assert np.array_equal(rounded(low, name), points[:-1])
    assert np.array_equal(rounded(high, name), points[1:])
    even = (
        np.arange(len(ties)) % 2 == 0
    )  # codes count upwards with the values: the even mantissa is the even code
    assert np.array_equal(rounded(ties, name), np.where(even, points[:-1], points[1:]))
    x = np.concatenate([points, ties, low, high])
    x = np.concatenate([x, -x])
    assert_same_bits(rounded(x, name), cast(x, name), x)


def test_grid_points_stay(name: str) -> None:
    points = grid(name)
    assert np.array_equal(rounded(points, name), points)


def test_beyond_the_maximum_saturates(name: str) -> None:
    top = np.float32(MAXIMA[name])
    above = np.array([np.nextafter(top, np.float32(np.inf)), top * 1.03, top * 1.07, 2 * top, 3e38, np.inf])
    assert np.array_equal(rounded(np.concatenate([above, -above]), name), np.repeat([top, -top], len(above)))


def test_specials(name: str) -> None:
    x = np.array([0.0, -0.0, 1e-45, -1e-45, np.nan], dtype=np.float32)
    assert_same_bits(rounded(x, name), np.array([0.0, -0.0, 0.0, -0.0, np.nan], dtype=np.float32), x)


def test_input_is_left_alone_and_any_shape_goes(name: str) -> None:
    x = torch.linspace(-3, 3, 24).view(2, 3, 4).transpose(0, 2)
    before = x.clone()
    y = round_to(x, FORMATS[name])
    assert torch.equal(x, before)
    assert torch.equal(y, round_to(x.contiguous(), FORMATS[name]))
    assert round_to(torch.tensor(0.3), FORMATS[name]).shape == ()
    assert round_to(torch.empty(0), FORMATS[name]).shape == (0,)


def test_the_grid_is_exact_in_bf16(name: str) -> None:
    """What lets the emulated GEMM run in BF16."""
    points = torch.from_numpy(grid(name))
    assert torch.equal(points.bfloat16().float(), points)
