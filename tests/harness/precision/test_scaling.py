"""Scales, their history, and what a cast says it did."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from harness.precision.scaling import Quantizer
from harness.spec import QuantizerSpec

from .conftest import cast, quantize


def quantizer(**fields: Any) -> Quantizer:
    return Quantizer(QuantizerSpec(**{"format": "e4m3", **fields}))


def delayed(**fields: Any) -> Quantizer:
    return quantizer(scaling="delayed", **fields)


def reach(q: Quantizer, x: torch.Tensor) -> float:
    """The largest magnitude that the scale for `x` maps onto E4M3's range: what the cast takes amax to be."""
    return 448 * float(q(x)[1])


def step(q: Quantizer, *amaxes: float) -> None:
    """One training step that sees tensors of these maxima."""
    for amax in amaxes:
        q(torch.tensor([amax, -amax / 2]))
    q.end_step()


def test_current_scale_brings_the_maximum_to_the_format_s() -> None:
    x = torch.randn(100)
    q, inverse = quantizer(scaling="current")(x)
    assert float(q.abs().max()) == 448
    assert float(inverse) == pytest.approx(float(x.abs().max()) / 448, rel=1e-6)


def test_the_largest_magnitude_may_be_negative() -> None:
    assert reach(quantizer(scaling="current"), torch.tensor([-8.0, 3.0])) == pytest.approx(8)


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_scale_equal_the_oracle(fmt: str, dtype: torch.dtype) -> None:
    x = torch.randn(64, 33, generator=torch.Generator().manual_seed(0)).mul_(7).to(dtype)
    q, inverse = quantizer(format=fmt, scaling="current")(x)
    wanted, scale = quantize(x.float().numpy(), fmt)
    assert np.array_equal(q.numpy(), wanted)
    assert float(inverse) == pytest.approx(1 / scale, rel=1e-7)
    assert q.dtype == inverse.dtype == torch.float32


def test_none_is_a_bare_cast() -> None:
    x = torch.tensor([1.06, 1000.0, -1e-5])
    q, inverse = quantizer(scaling="none")(x)
    assert float(inverse) == 1
    assert np.array_equal(q.numpy(), cast(x.numpy(), "e4m3"))


def test_margin_divides_by_a_power_of_two() -> None:
    x = torch.tensor([3.0])
    assert reach(quantizer(scaling="current", margin=2), x) == pytest.approx(3 * 4)


def test_power_of_two_rounds_the_scale_down() -> None:
    for exponent in range(-60, 60):
        for amax in (448 * 2.0**exponent, 448 * 2.0**exponent * 1.001, 448 * 2.0**exponent * 0.999):
            exact = math.floor(math.log2(448) - math.log2(amax) + 1e-12)
            scale = quantizer(scaling="current", power_of_two=True).scale_for(torch.tensor(amax))
            assert float(scale) == 2.0**exact, amax


@pytest.mark.parametrize("amax", [0.0, math.inf, math.nan])
@pytest.mark.parametrize("fields", [{}, {"margin": 3}, {"power_of_two": True}])
def test_an_unusable_maximum_gives_scale_one(amax: float, fields: dict[str, Any]) -> None:
    assert float(quantizer(scaling="current", **fields).scale_for(torch.tensor(amax))) == 1


@pytest.mark.parametrize("amax", [1e-45, 1e-38, 3e38])
def test_extreme_maxima_give_finite_scales_and_inverses(amax: float) -> None:
    q, inverse = quantizer(scaling="current")(torch.tensor([amax]))
    assert math.isfinite(float(q)) and 0 < float(inverse) < math.inf


def test_nan_and_infinity_in_a_tensor() -> None:
    q, inverse = quantizer(scaling="current")(torch.tensor([math.nan, 2.0]))
    assert math.isnan(float(q[0])) and float(q[1] * inverse) == 2
    q, inverse = quantizer(scaling="current")(torch.tensor([math.inf, 2.0]))
    assert (q * inverse).tolist() == [448, 2]


def test_delayed_calibrates_on_the_first_tensor_then_lags() -> None:
    q = delayed(history=4)
    assert reach(q, torch.tensor([2.0])) == pytest.approx(2)
    assert reach(q, torch.tensor([4.0])) == pytest.approx(4)  # still the first step: no history yet
    q.end_step()
    assert reach(q, torch.tensor([400.0])) == pytest.approx(4)  # the step's maximum, not this tensor's
    clipped, inverse = q(torch.tensor([400.0]))
    assert float(clipped * inverse) == pytest.approx(4)  # a sudden outlier is clipped to what was seen


def test_max_takes_the_largest_of_the_history_and_forgets() -> None:
    q = delayed(history=3, amax="max")
    seen = []
    for amax in (8.0, 2.0, 1.0, 4.0, 1.0, 1.0, 1.0):
        step(q, amax)
        seen.append(reach(q.eval(), torch.tensor([1.0])))
        q.train()
    assert seen == pytest.approx([8, 8, 8, 4, 4, 4, 1])


def test_most_recent_takes_the_last_step() -> None:
    q = delayed(history=3, amax="most_recent")
    for amax in (8.0, 2.0, 4.0):
        step(q, amax)
        assert reach(q.eval(), torch.tensor([1.0])) == pytest.approx(amax)
        q.train()


def test_history_of_one_is_the_step_before() -> None:
    q = delayed(history=1)
    for amax in (8.0, 2.0, 4.0):
        step(q, amax)
        assert q.amax_history.tolist() == [amax]


def test_a_step_counts_its_largest_tensor() -> None:
    q = delayed(history=2)
    step(q, 3.0, 7.0, 5.0)
    assert q.amax_history.tolist() == [7, 0]
    assert float(q.amax_now) == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_step_that_is_not_finite_does_not_poison_the_history(bad: float) -> None:
    q = delayed(history=3)
    step(q, 3.0)
    step(q, 5.0, bad)
    assert q.amax_history.tolist() == [3, 0, 0]
    step(q, 2.0)
    assert q.amax_history.tolist() == [2, 3, 0]


def test_a_step_without_a_call_leaves_the_history() -> None:
    q = delayed(history=2)
    step(q, 3.0)
    q.end_step()
    assert q.amax_history.tolist() == [3, 0]


def test_evaluation_moves_nothing() -> None:
    q = delayed(history=2)
    step(q, 3.0)
    before = {name: value.clone() for name, value in q.state_dict().items()}
    q.eval()
    q(torch.tensor([100.0]))
    assert all(torch.equal(value, before[name]) for name, value in q.state_dict().items())
    q.train()
    q.end_step()
    assert q.amax_history.tolist() == [3, 0]


def test_state_survives() -> None:
    q, other = delayed(history=3), delayed(history=3)
    step(q, 3.0)
    step(q, 9.0)
    q(torch.tensor([11.0]))
    other.load_state_dict(q.state_dict())
    assert other.amax_history.tolist() == [9, 3, 0]
    assert float(other.amax_now) == 11
    assert not quantizer(scaling="current").state_dict()


def test_an_empty_tensor() -> None:
    for scaling in ("none", "current", "delayed"):
        q, inverse = quantizer(scaling=scaling)(torch.empty(0, 4))
        assert q.shape == (0, 4) and float(inverse) == 1


def test_statistics_equal_an_oracle() -> None:
    x = torch.randn(5000, generator=torch.Generator().manual_seed(3)).exp_()
    x[::7] = 0
    x[1], x[2], x[3] = 3e3, -1e-7, 50.0
    q = delayed(history=1)
    step(q, 40.0)
    q.collect = True
    q(x)
    q.collect = False
    found = q.statistics
    assert found is not None
    wide = x.numpy().astype(np.float64)
    grid, scale = quantize(x.numpy(), "e4m3", amax=40.0)
    nonzero = np.count_nonzero(wide)
    noise = ((wide - grid.astype(np.float64) / scale) ** 2).sum()
    assert found.amax == 3000
    assert found.scale == pytest.approx(scale)
    clipped, flushed = (np.abs(wide) > 40).sum(), ((grid == 0) & (wide != 0)).sum()
    assert clipped > 1 and flushed >= 1
    assert found.clipped_fraction == clipped / nonzero
    assert found.flushed_fraction == flushed / nonzero
    assert found.sqnr_db == pytest.approx(10 * np.log10((wide**2).sum() / noise), abs=1e-6)


def test_current_scaling_clips_nothing() -> None:
    """amax * (448 / amax) may round to just above 448; that is no clipping."""
    generator = torch.Generator().manual_seed(0)
    q = quantizer(scaling="current")
    q.collect = True
    for _ in range(200):
        q(torch.randn(50, generator=generator))
        assert q.statistics is not None
        assert q.statistics.clipped_fraction == 0


def test_gaussian_sqnr_is_that_of_the_format() -> None:
    """About 31.5 dB for E4M3 and 25.6 dB for E5M2 on a normal distribution with per-tensor scales."""
    x = torch.randn(1 << 18, generator=torch.Generator().manual_seed(0))
    for fmt, sqnr in (("e4m3", 31.5), ("e5m2", 25.6)):
        q = quantizer(format=fmt, scaling="current")
        q.collect = True
        q(x)
        assert q.statistics is not None
        assert q.statistics.sqnr_db == pytest.approx(sqnr, abs=0.3)


def test_an_exact_cast_has_no_noise() -> None:
    q = quantizer(scaling="none")
    q.collect = True
    q(torch.tensor([1.0, 2.0, -448.0]))
    assert q.statistics is not None
    assert (q.statistics.sqnr_db, q.statistics.clipped_fraction, q.statistics.flushed_fraction) == (300, 0, 0)
