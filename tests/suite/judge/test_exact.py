"""Statistics that are facts: one run decides, and the reason says why."""

from __future__ import annotations

import math

import pytest

from suite.judge.catalogue import STATISTICS
from suite.judge.decision import decide, make_rule
from suite.judge.measures import find_measure


@pytest.mark.parametrize(
    ("name", "value", "effects", "word"),
    [
        ("within", (448, 448), [448.0], "reproduced"),
        ("within", (448, 448), [240.0], "differs"),
        ("within", (448, 448), [448.0, 448.0], "reproduced"),
        ("at_most", 0, [0.0], "reproduced"),
        ("at_most", 0, [1.0], "differs"),
        ("above", 0, [0.0], "differs"),
        ("within", (math.log(8), math.log(8)), [math.log(2**-7) - math.log(2**-10)], "reproduced"),
        ("within", (448, 448), [448.0, 240.0], "differs"),
        ("at_least", 200, [448.0, 240.0], "inconclusive"),
    ],
)
def test_one_run_decides(name: str, value: object, effects: list[float], word: str) -> None:
    decision = decide(make_rule(name, value), effects, exact=True)  # type: ignore[arg-type]
    assert decision.word == word
    assert decision.interval is None and decision.seeds_needed is None
    assert "exact" in decision.because


def test_nothing_measured_is_not_run() -> None:
    assert decide(make_rule("at_most", 0), [], exact=True).word == "not run"


def test_a_sample_of_one_still_decides_nothing() -> None:
    assert decide(make_rule("within", (1, 1)), [1.0]).word == "inconclusive"


def test_format_statistics_are_exact_and_losses_are_not() -> None:
    exact = {name for name, statistic in STATISTICS.items() if statistic.exact}
    assert {"format_max", "format_num_levels", "format_mismatches"} <= exact
    assert not {"final_loss", "quant_sqnr_db", "quant_saturated_blocks"} & exact
    assert find_measure("format_max[finfo]").is_exact
