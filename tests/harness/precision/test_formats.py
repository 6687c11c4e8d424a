"""Constants of the formats, against the numbers that the papers print and against ml_dtypes."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

from harness.precision.formats import E4M3, E5M2, FORMATS, FloatFormat

from .conftest import DTYPES


def test_printed_constants() -> None:
    """Micikevicius et al. 2022, table 1."""
    assert (E4M3.bias, E4M3.max, E4M3.min_normal, E4M3.min_subnormal) == (7, 448, 2**-6, 2**-9)
    assert (E5M2.bias, E5M2.max, E5M2.min_normal, E5M2.min_subnormal) == (15, 57344, 2**-14, 2**-16)


def test_binades() -> None:
    assert math.log2(E4M3.max / E4M3.min_subnormal) == pytest.approx(17.81, abs=0.005)
    assert math.log2(E5M2.max / E5M2.min_subnormal) == pytest.approx(31.81, abs=0.005)


@pytest.mark.parametrize("name", FORMATS)
def test_against_ml_dtypes(name: str) -> None:
    ours, theirs = FORMATS[name], ml_dtypes.finfo(DTYPES[name])
    assert ours.max == float(theirs.max)
    assert ours.min_normal == float(theirs.smallest_normal)
    assert ours.min_subnormal == float(theirs.smallest_subnormal)
    assert ours.mantissa_bits == theirs.nmant
    assert ours.exponent_bits == theirs.nexp


def test_ieee_like_e4m3_ends_at_240() -> None:
    """Gaudi2's format: the same bits, its top exponent kept for infinities."""
    assert FloatFormat("e4m3-ieee", 4, 3).max == 240 == float(ml_dtypes.finfo(ml_dtypes.float8_e4m3).max)


def test_number_of_finite_values() -> None:
    """127 and 124 non-negative finite codes: what a grid built from the constants must have too."""
    for fmt, count in ((E4M3, 127), (E5M2, 124)):
        codes = np.arange(128, dtype=np.uint8).view(DTYPES[fmt.name]).astype(np.float64)
        assert np.isfinite(codes).sum() == count
        steps = 2**fmt.mantissa_bits
        binades = round(math.log2(fmt.max / fmt.min_normal) - 0.5) + 1
        unused = 1 if fmt.finite_only else 0  # the pattern that is NaN
        assert binades * steps - unused + steps == count
