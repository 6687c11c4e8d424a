"""Every rule over effects whose verdict is plain."""

import math

import pytest

from suite.judge.decision import decide, make_rule

INF = math.inf


def around(mean: float, spread: float) -> list[float]:
    return [mean - spread, mean, mean + spread]


# With three pairs mean ± s the 95 % interval is mean ± 2.48 s and the 90 % interval mean ± 1.69 s.
CASES = [
    ("above", 0.05, around(0.2, 0.01), "reproduced"),
    ("above", 0.05, around(0.02, 0.001), "direction reproduced"),
    ("above", 0.05, around(0.06, 0.01), "direction reproduced"),
    ("above", 0.05, around(0.06, 0.05), "inconclusive"),
    ("above", 0.05, around(-0.2, 0.01), "differs"),
    ("above", 0.05, around(0.01, 0.005), "differs"),
    ("above", 0.0, around(0.01, 0.005), "inconclusive"),
    ("above", 0.0, around(-0.2, 0.01), "differs"),
    ("above", -0.1, around(-0.2, 0.01), "differs"),
    ("above", -0.1, around(0.0, 0.01), "reproduced"),
    ("above", 0.2, [0.2, 0.2, 0.2], "direction reproduced"),
    ("at_least", 0.2, [0.2, 0.2, 0.2], "reproduced"),
    ("at_most", 0.0, [0.0, 0.0], "reproduced"),
    ("above", 0.0, [0.0, 0.0], "differs"),
    ("below", -0.05, around(-0.2, 0.01), "reproduced"),
    ("below", -0.05, around(-0.02, 0.001), "direction reproduced"),
    ("below", -0.05, around(-0.06, 0.05), "inconclusive"),
    ("below", -0.05, around(0.2, 0.01), "differs"),
    ("below", 0.1, around(0.0, 0.01), "reproduced"),
    ("below", 0.1, around(0.2, 0.01), "differs"),
    ("within", (0.1, 0.3), around(0.2, 0.01), "reproduced"),
    ("within", (0.1, 0.3), around(0.4, 0.01), "differs"),
    ("within", (0.1, 0.3), around(0.3, 0.01), "inconclusive"),
    ("within", (0.1, 0.3), around(0.2, 0.2), "inconclusive"),
    ("non_inferior_within", 0.01, around(0.0, 0.005), "reproduced"),
    ("non_inferior_within", 0.01, around(-0.5, 0.1), "reproduced"),
    ("non_inferior_within", 0.01, around(0.005, 0.005), "inconclusive"),
    ("non_inferior_within", 0.01, around(0.03, 0.005), "differs"),
    ("above", 0.05, [0.3], "inconclusive"),
    ("non_inferior_within", 0.01, [0.0], "inconclusive"),
]


@pytest.mark.parametrize(("name", "value", "effects", "word"), CASES)
def test_finite(name, value, effects, word):
    decision = decide(make_rule(name, value), effects)
    assert decision.word == word
    assert decision.because
    assert (decision.seeds_needed is not None) <= (word == "inconclusive")
    if word == "inconclusive" and decision.seeds_needed is not None:
        assert decision.seeds_needed > len(effects)


def test_at_small_effects_differs_means_not_even_the_direction():
    """The interval 0.01 ± 0.0124 reaches below zero and stays below 0.05."""
    decision = decide(make_rule("above", 0.05), around(0.01, 0.005))
    assert decision.interval.low < 0 < decision.interval.high < 0.05


def test_no_direction_for_what_cannot_be_negative():
    rule = make_rule("above", 0.5, has_direction=False)
    assert decide(rule, around(0.1, 0.01)).word == "differs"
    assert decide(rule, around(0.5, 0.01)).word == "inconclusive"


INFINITE = [
    ("above", 0.05, [INF] * 3, "reproduced"),
    ("above", 0.05, [-INF] * 3, "differs"),
    ("below", 0.05, [INF] * 3, "differs"),
    ("below", 0.05, [-INF] * 3, "reproduced"),
    ("within", (0.0, 1.0), [INF] * 3, "differs"),
    ("non_inferior_within", 0.01, [INF] * 3, "differs"),
    ("non_inferior_within", 0.01, [-INF] * 3, "reproduced"),
    ("above", 0.05, [INF], "inconclusive"),
    ("above", 0.05, [INF, -INF], "inconclusive"),
    # A mix: the finite pairs must decide by themselves, and the same way.
    ("above", 0.05, [*around(0.2, 0.01), INF], "reproduced"),
    ("above", 0.05, [*around(0.02, 0.001), INF], "direction reproduced"),
    ("above", 0.05, [0.3, INF, INF], "inconclusive"),
    ("above", 0.05, [*around(-0.2, 0.01), INF], "inconclusive"),
    ("above", 0.05, [*around(0.2, 0.01), -INF], "inconclusive"),
    ("above", 0.05, [*around(-0.2, 0.01), -INF], "differs"),
    ("non_inferior_within", 0.01, [*around(0.0, 0.001), INF], "inconclusive"),
    ("non_inferior_within", 0.01, [*around(0.1, 0.001), INF], "differs"),
    ("non_inferior_within", 0.01, [*around(0.1, 0.001), -INF], "inconclusive"),
    ("within", (0.0, 1.0), [*around(0.5, 0.001), INF], "inconclusive"),
    ("within", (0.0, 1.0), [*around(2.0, 0.001), INF], "differs"),
    ("within", (0.0, 1.0), [*around(2.0, 0.001), INF, -INF], "inconclusive"),
]


@pytest.mark.parametrize(("name", "value", "effects", "word"), INFINITE)
def test_diverged(name, value, effects, word):
    decision = decide(make_rule(name, value), effects)
    assert decision.word == word
    assert decision.num_pairs == len(effects)


def test_nothing_and_nan():
    assert decide(make_rule("above", 0.0), []).word == "not run"
    with pytest.raises(ValueError, match="NaN"):
        decide(make_rule("above", 0.0), [math.nan])


def test_more_pairs_do_decide():
    """Following the advice `seeds_needed` decides about four times in five."""
    import numpy as np

    rng = np.random.default_rng(1)
    rule = make_rule("above", 0.05)
    first = decide(rule, around(0.1, 0.05))
    assert first.word == "inconclusive"
    again = rng.normal(0.1, 0.05, (500, first.seeds_needed))
    share = np.mean([decide(rule, list(effects)).word == "reproduced" for effects in again])
    assert 0.74 < share < 0.9
