"""Intervals and tests over pairs of runs that share a seed.

Pairs are few (three is common), so everything here is Student's t on the paired differences: with three
pairs no rank test can reach 5 %, and a bootstrap of three values has an interval that is far too short. A
measure that is a ratio is handed in as logarithms. Seeds are the replication unit: one value a seed, never
one a step.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95
"""Coverage of two-sided intervals."""
ALPHA = 0.05
"""Error rate of the one-sided non-inferiority test."""
POWER = 0.8
"""Power asked for when the number of pairs that would decide is worked out."""
MAX_PAIRS = 10_000
"""Above this many pairs the answer is that no affordable number decides."""


@dataclass(frozen=True)
class Interval:
    """Mean of paired effects and its two-sided interval; unbounded for one pair, which shows no spread."""

    mean: float
    low: float
    high: float
    sd: float
    """Sample standard deviation (n - 1); NaN for one pair."""
    num_pairs: int
    confidence: float = CONFIDENCE

    @property
    def bounded(self) -> bool:
        return math.isfinite(self.low) and math.isfinite(self.high)


def paired_interval(effects: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """Two-sided t interval of the mean: mean ± t(1 - (1 - confidence) / 2, n - 1) · sd / √n.

    One-sided bounds at error rate a are the ends of the interval with confidence 1 - 2a.
    Raises ValueError for no effects and for effects that are not finite.
    """
    num_pairs = len(effects)
    if num_pairs == 0:
        raise ValueError("an interval needs at least one pair")
    if not all(math.isfinite(effect) for effect in effects):
        raise ValueError("an interval needs finite effects; count diverged pairs apart")
    mean = statistics.mean(effects)  # exact, so that equal effects have an interval of no width
    if num_pairs == 1:
        return Interval(mean, -math.inf, math.inf, math.nan, 1, confidence)
    sd = statistics.stdev(effects)
    half = _t_quantile(1 - (1 - confidence) / 2, num_pairs - 1) * sd / math.sqrt(num_pairs)
    return Interval(mean, mean - half, mean + half, sd, num_pairs, confidence)


def pairs_to_decide(distance: float, sd: float, alpha: float, power: float = POWER) -> int | None:
    """Smallest number of pairs whose one-sided t test at `alpha` sees `distance` with `power`.

    `distance` is how far the observed mean lies from the bound that the claim names, `sd` the observed
    standard deviation of the pairs: a plan for the next try under the belief that both are true. A
    two-sided interval that must clear a bound is a one-sided test at half its error rate. Noncentral t: P(T
    > t(1 - alpha, n - 1)) with noncentrality distance · √n / sd. None where the mean sits on the bound, or
    MAX_PAIRS would not do.
    """
    distance = abs(distance)
    if distance == 0 or not math.isfinite(distance) or not math.isfinite(sd):
        return None
    if sd == 0:
        return 2
    # The normal approximation asks for two or three pairs too few: start there and walk up.
    num_pairs = max(2, math.floor(((_z(1 - alpha) + _z(power)) * sd / distance) ** 2))
    if num_pairs > MAX_PAIRS:
        return None
    while power_of(distance, sd, num_pairs, alpha) < power:
        num_pairs += 1
    return num_pairs


def power_of(distance: float, sd: float, num_pairs: int, alpha: float) -> float:
    """Chance that a one-sided paired t test at `alpha` with `num_pairs` pairs sees a true `distance`."""
    from scipy.stats import nct

    bound = _t_quantile(1 - alpha, num_pairs - 1)
    return float(nct.sf(bound, num_pairs - 1, distance * math.sqrt(num_pairs) / sd))


def _t_quantile(probability: float, degrees: int) -> float:
    from scipy.special import stdtrit

    return float(stdtrit(degrees, probability))


def _z(probability: float) -> float:
    return statistics.NormalDist().inv_cdf(probability)
