"""The intervals and tests against data whose truth is known, and against SciPy."""

import math

import numpy as np
import pytest
from scipy.stats import norm, ttest_1samp, ttest_rel

from suite.judge.decision import decide, make_rule
from suite.judge.statistics import paired_interval, pairs_to_decide, power_of

RNG_SEED = 20261129


def test_interval_equals_scipy():
    rng = np.random.default_rng(RNG_SEED)
    for n in (2, 3, 5, 20):
        of, against = rng.normal(2.1, 0.2, n), rng.normal(2.0, 0.2, n)
        for confidence in (0.9, 0.95):
            ours = paired_interval(list(of - against), confidence)
            theirs = ttest_rel(of, against).confidence_interval(confidence)
            assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), rel=1e-9)


def test_non_inferiority_is_scipys_one_sided_test():
    rng = np.random.default_rng(RNG_SEED)
    rule = make_rule("non_inferior_within", 0.05)
    words = set()
    for _ in range(300):
        effects = list(rng.normal(0.03, 0.03, 4))
        p_better = ttest_1samp(effects, 0.05, alternative="less").pvalue
        p_worse = ttest_1samp(effects, 0.05, alternative="greater").pvalue
        word = "reproduced" if p_better < 0.05 else "differs" if p_worse < 0.05 else "inconclusive"
        assert decide(rule, effects).word == word
        words.add(word)
    assert {"reproduced", "inconclusive"} <= words


@pytest.mark.parametrize("n", [2, 3, 5, 12])
@pytest.mark.parametrize("confidence", [0.9, 0.95])
def test_coverage(n, confidence):
    """Over 2,000 samples the truth lies inside as often as claimed, within four standard errors."""
    rng = np.random.default_rng(RNG_SEED + n)
    samples, truth = 2000, 0.3
    inside = 0
    for effects in rng.normal(truth, 0.1, (samples, n)):
        interval = paired_interval(list(effects), confidence)
        inside += interval.low <= truth <= interval.high
    assert inside / samples == pytest.approx(
        confidence, abs=4 * math.sqrt(confidence * (1 - confidence) / samples)
    )


@pytest.mark.parametrize(
    ("name", "value", "limit"),
    [
        ("non_inferior_within", 0.1, 0.05),
        ("above", 0.1, 0.025),
        ("below", 0.1, 0.025),
        ("at_least", 0.1, 0.025),
    ],
)
@pytest.mark.parametrize("n", [3, 8])
def test_false_reproductions_at_the_bound(name, value, limit, n):
    """With the true effect on the bound, `reproduced` comes up no oftener than the test's error rate."""
    rng = np.random.default_rng(RNG_SEED + n)
    rule, samples = make_rule(name, value), 2000
    wrong = sum(
        decide(rule, list(effects)).word == "reproduced" for effects in rng.normal(0.1, 0.05, (samples, n))
    )
    error = 4 * math.sqrt(limit * (1 - limit) / samples)
    assert wrong / samples == pytest.approx(limit, abs=error)


@pytest.mark.parametrize("alpha", [0.025, 0.05])
@pytest.mark.parametrize("distance", [0.5, 1.0, 3.0])
def test_power_is_what_simulation_finds(alpha, distance):
    rng = np.random.default_rng(RNG_SEED)
    n, samples = 6, 4000
    draws = rng.normal(distance, 1.0, (samples, n))
    found = np.mean(ttest_1samp(draws, 0.0, axis=1, alternative="greater").pvalue < alpha)
    assert power_of(distance, 1.0, n, alpha) == pytest.approx(found, abs=4 * math.sqrt(0.25 / samples))


def test_number_of_pairs_is_the_smallest_with_the_power():
    for alpha in (0.025, 0.05):
        for distance in (0.05, 0.2, 0.7, 1.5, 6.0):
            n = pairs_to_decide(distance, 1.0, alpha)
            assert power_of(distance, 1.0, n, alpha) >= 0.8
            assert n == 2 or power_of(distance, 1.0, n - 1, alpha) < 0.8
            # Never fewer than the normal approximation, and close to it when it is large.
            z = ((norm.ppf(1 - alpha) + norm.ppf(0.8)) / distance) ** 2
            assert z <= n <= z + 6


def test_number_of_pairs_of_known_designs():
    """Textbook values for an effect of one standard deviation at 80 % power: two-sided 5 %, one-sided 5 %."""
    assert pairs_to_decide(1.0, 1.0, 0.025) == 10
    assert pairs_to_decide(1.0, 1.0, 0.05) == 8


def test_edges():
    one = paired_interval([0.2])
    assert not one.bounded
    assert one.mean == 0.2
    same = paired_interval([0.2, 0.2, 0.2])
    assert (same.low, same.high, same.sd) == (0.2, 0.2, 0.0)
    assert pairs_to_decide(0.1, 0.0, 0.025) == 2
    assert pairs_to_decide(0.0, 1.0, 0.025) is None
    assert pairs_to_decide(1e-6, 1.0, 0.025) is None
    with pytest.raises(ValueError, match="at least one"):
        paired_interval([])
    with pytest.raises(ValueError, match="finite"):
        paired_interval([0.1, math.inf])
