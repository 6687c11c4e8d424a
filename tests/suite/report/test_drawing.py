"""Scales, bands, strips and charts, down to their numbers."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from suite.report.claims import claim_view, rule_ends
from suite.report.lines import MAX_NUMBERS, MAX_POINTS, Series, line_chart, points_for
from suite.report.look import Look
from suite.report.scale import Scale, around_zero, linear, nice_step
from suite.report.series import band, differences, thin
from suite.report.svg import interval_strip

INK = Look(0, "", "circle")


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (-0.003, 0.011, [0, 0.005, 0.01]),
        (2.3, 3.1, [2.4, 2.6, 2.8, 3.0]),
    ],
)
def test_ticks_are_round(low: float, high: float, ticks: list[float]) -> None:
    assert Scale(low, high).ticks(5) == pytest.approx(ticks)


@given(st.floats(1e-9, 1e12))
def test_nice_step_is_at_most_ten_times_too_large(raw: float) -> None:
    step = nice_step(raw)
    assert raw * 0.998 <= step <= raw * 10


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=30))
def test_every_value_lies_on_its_scale(values: list[float]) -> None:
    for scale in (linear(values), around_zero(values)):
        assert all(-1e-9 <= scale.at(value) <= 1 + 1e-9 for value in values)
        assert scale.low < scale.high
        assert len(scale.ticks(5)) <= 12


def test_one_broken_arm_does_not_flatten_the_others() -> None:
    scale = around_zero([0.001, 0.002, 0.003, 0.004, 3.0])
    assert scale.linear_until == pytest.approx(0.001)
    assert scale.at(0.003) - scale.at(0.001) > 0.05
    assert scale.at(3.0) <= 1
    assert 0.0 in scale.ticks(5)
    assert around_zero([0.001, 0.002, 0.003]).linear_until is None


def test_a_band_is_mean_lowest_and_highest_of_the_seeds() -> None:
    one, two = [(1, 1.0), (2, 2.0), (3, 3.0)], [(1, 3.0), (2, 2.0)]
    result = band([one, two], 10)
    assert result.steps == (1, 2, 3)
    assert result.mean == (2.0, 2.0, 3.0)
    assert result.low == (1.0, 2.0, 3.0)
    assert result.high == (3.0, 2.0, 3.0)
    assert result.num_seeds == 2
    assert result.last == 3.0


def test_windows_are_means_and_end_at_the_last_step() -> None:
    curve = [(step, float(step)) for step in range(1, 101)]
    assert band([curve], 4).steps == (25, 50, 75, 100)
    assert band([curve], 4).mean == (13.0, 38.0, 63.0, 88.0)
    assert thin(curve, 4) == [(25, 13.0), (50, 38.0), (75, 63.0), (100, 88.0)]


def test_a_divergence_is_not_averaged_away() -> None:
    curve = [(step, math.nan if step == 99 else 1.0) for step in range(1, 101)]
    assert math.isnan(thin(curve, 10)[-1][1])
    assert band([[(1, math.inf)]], 10).mean == (None,)


def test_gaps_are_taken_at_common_steps() -> None:
    assert differences([(1, 3.0), (2, 4.0), (4, 1.0)], [(2, 1.5), (3, 0.0), (4, 1.0)]) == [(2, 2.5), (4, 0.0)]


def test_an_interval_beyond_the_axis_gets_an_arrow() -> None:
    inside = interval_strip(Scale(-1, 1), 0.0, -0.5, 0.5)
    beyond = interval_strip(Scale(-1, 1), 0.0, -0.5, 5.0)
    infinite = interval_strip(Scale(-1, 1), math.inf, None, None)
    assert (inside.count("<path"), beyond.count("<path"), infinite.count("<path")) == (0, 1, 1)
    assert 'x1="25%" x2="75%"' in inside


def test_embedded_data_keep_to_their_limits() -> None:
    assert points_for(1) == MAX_POINTS
    assert points_for(1000) >= 50
    assert points_for(20) * 20 * 3 <= MAX_NUMBERS
    curve = [(step, 1 / step) for step in range(1, 20_000)]
    chart = line_chart("c", "Title", [Series("a", INK, band([curve], points_for(1)))], y_label="nats")
    assert len(chart.data["x"]) == MAX_POINTS
    assert len(str(chart.svg)) < 6_000


def test_a_series_that_stops_leaves_a_hole_and_not_a_line() -> None:
    chart = line_chart(
        "c", "T", [Series("a", INK, band([[(1, 1.0), (2, math.nan), (3, 2.0), (4, 1.0)]], 10))], y_label="y"
    )
    path = str(chart.svg).split('class="s0 series"')[0].rsplit('d="', 1)[1]
    assert path.count("M") == 2
    assert chart.data["series"][0]["mean"] == [1.0, None, 2.0, 1.0]


@pytest.mark.parametrize(
    ("measure", "expect", "ends"),
    [
        ("final_loss_gap", {"above": 0.05}, (0.05, math.inf)),
        ("final_loss_gap", {"at_most": 0.1}, (-math.inf, 0.1)),
        ("final_loss_gap", {"within": [-1, 1]}, (-1, 1)),
        ("final_loss_gap", {"non_inferior_within": 0.01}, (-math.inf, 0.01)),
        ("ffn_output_sqnr_db_gap", {"non_inferior_within": 1}, (-1, math.inf)),
        ("throughput_ratio", {"non_inferior_within": 0.1}, (0.9, math.inf)),
        ("peak_bytes_ratio", {"non_inferior_within": 0.1}, (-math.inf, 1.1)),
    ],
)
def test_the_shaded_range_is_the_rule(
    measure: str, expect: dict[str, object], ends: tuple[float, float]
) -> None:
    from suite.judge.measures import find_measure

    assert rule_ends({"above": None, **expect}, find_measure(measure)) == pytest.approx(ends)


ROW = {"case_name": "c", "size": "laptop", "verdict": "reproduced", "reason": "", "num_pairs": 2}


def test_a_verdict_with_a_diverged_arm_and_no_interval() -> None:
    claim = {"of": {"precision": "fp8"}, "against": {"precision": "bf16"}, "expect": {"above": 0.05}}
    pair = {"of": None, "against": 2.0, "effect": None, "diverged": True}
    row = ROW | {"claim_id": "it-breaks", "measure": "final_loss_gap", "effect": math.inf, "claim": claim}
    view = claim_view(row | {"pairs": [pair | {"seed": 0}, pair | {"seed": 1}]})
    assert view.headline == "It breaks"
    assert view.effect == "+∞\N{NO-BREAK SPACE}nats"
    assert view.interval == ""
    assert [seed.effect for seed in view.seeds] == ["diverged", "diverged"]
    assert "rule" in view.strip


def test_a_ratio_is_shown_as_a_ratio_though_pairs_hold_logarithms() -> None:
    claim = {"of": {}, "against": {}, "expect": {"at_least": 1.2}}
    pair = {"seed": 0, "of": 130.0, "against": 100.0, "effect": math.log(1.3), "diverged": False}
    row = ROW | {
        "claim_id": "faster",
        "measure": "throughput_ratio",
        "effect": 1.3,
        "low": 1.25,
        "high": 1.36,
    }
    view = claim_view(row | {"confidence": 0.95, "claim": claim, "pairs": [pair]})
    assert (view.effect, view.interval, view.rule) == ("1.30×", "[1.25, 1.36]", "at least 1.2×")
    assert view.seeds[0].effect == "1.30×"
