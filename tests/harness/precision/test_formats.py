"""Constants of the formats, against the numbers that the papers print and against ml_dtypes."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

from harness.precision.formats import FORMATS, FloatFormat, find_format

DTYPES = {
    "bf16": ml_dtypes.bfloat16,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e4m3-ieee": ml_dtypes.float8_e4m3,
    "e5m2": ml_dtypes.float8_e5m2,
    "e3m4": ml_dtypes.float8_e3m4,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
}


def _float(name: str) -> FloatFormat:
    fmt = find_format(name)
    assert isinstance(fmt, FloatFormat)
    return fmt


def test_printed_constants() -> None:
    """Micikevicius et al. 2022."""
    for name, expected in (
        ("e4m3", (7, 448, 2**-6, 2**-9, 127)),
        ("e5m2", (15, 57344, 2**-14, 2**-16, 124)),
    ):
        fmt = _float(name)
        assert (fmt.bias, fmt.max, fmt.min_normal, fmt.min_positive, fmt.num_magnitudes) == expected


def test_binades() -> None:
    assert _float("e4m3").binades == pytest.approx(17.81, abs=0.005)
    assert _float("e5m2").binades == pytest.approx(31.81, abs=0.005)


@pytest.mark.parametrize("name", DTYPES)
def test_against_ml_dtypes(name: str) -> None:
    ours, theirs = _float(name), ml_dtypes.finfo(DTYPES[name])
    assert ours.max == float(theirs.max)
    assert ours.min_normal == float(theirs.smallest_normal)
    assert ours.min_positive == float(theirs.smallest_subnormal)
    assert ours.epsilon == float(theirs.eps)
    assert (ours.mantissa_bits, ours.exponent_bits) == (theirs.nmant, theirs.nexp)


@pytest.mark.parametrize("name", [name for name in DTYPES if name != "bf16"])
def test_magnitudes_are_the_codes(name: str) -> None:
    """Every code without a sign, read by ml_dtypes, is a magnitude, and no magnitude is missing."""
    fmt = _float(name)
    codes = np.arange(2 ** (fmt.bits - 1), dtype=np.uint8).view(DTYPES[name]).astype(np.float64)
    finite = codes[np.isfinite(codes)]
    assert list(fmt.magnitudes()) == sorted(finite)
    assert fmt.num_magnitudes == len(finite)


@pytest.mark.parametrize("name", [name for name, fmt in FORMATS.items() if isinstance(fmt, FloatFormat)])
def test_epsilon_is_the_step_above_one(name: str) -> None:
    """Where 1 is a subnormal (E1M2) the step is that of the subnormals."""
    fmt = _float(name)
    if fmt.bits > 8:
        assert fmt.epsilon == 2.0**-fmt.mantissa_bits
        return
    values = list(fmt.magnitudes())
    assert fmt.epsilon == values[values.index(1.0) + 1] - 1


def test_gaudi_ends_0_9_binades_lower() -> None:
    assert math.log2(_float("e4m3").max / _float("e4m3-ieee").max) == pytest.approx(0.9, abs=0.005)
