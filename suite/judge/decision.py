"""From an interval and a claim's rule to a verdict's word. Pure arithmetic; no runs, no database.

Rules are written for effects on a line where 0 means "no difference"; ratios and their bounds are logarithms.

    rule                    reproduced            differs
    above x                 low > x               high <= x
    at_least x              low >= x              high < x
    below x, at_most x      mirror images
    within [a, b]           a <= low, high <= b   high < a or low > b
    non_inferior_within m   upper bound < m       lower bound >= m

What neither column catches is inconclusive. `direction reproduced` takes the place of the last two words
where an effect claimed above x >= 0 (below x <= 0) lies on that side of 0 throughout.

Diverged runs have infinite effects. They decide alone only where every pair has one; in a mix they may only
strengthen what the finite pairs decide by themselves, otherwise the answer is inconclusive.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from suite.judge.statistics import ALPHA, CONFIDENCE, Interval, paired_interval, pairs_to_decide

Word = Literal["reproduced", "direction reproduced", "differs", "inconclusive", "not comparable", "not run"]
RuleName = Literal["above", "below", "at_least", "at_most", "within", "non_inferior_within"]


@dataclass(frozen=True)
class Rule:
    """A claim's rule with its bounds in effect space; `low` and `high` are the allowed range's ends."""

    name: RuleName
    low: float
    high: float
    has_direction: bool = True

    @property
    def confidence(self) -> float:
        """Of the two-sided interval whose ends decide; one-sided bounds at ALPHA end one of 1 - 2·ALPHA."""
        return 1 - 2 * ALPHA if self.name == "non_inferior_within" else CONFIDENCE

    def admits(self, effect: float) -> bool:
        """Whether a single exact effect would satisfy the rule."""
        if self.name in ("above", "below", "non_inferior_within"):
            return self.low < effect < self.high
        return self.low <= effect <= self.high

    @property
    def bounds(self) -> tuple[float, ...]:
        return tuple(bound for bound in (self.low, self.high) if math.isfinite(bound))


@dataclass(frozen=True)
class Decision:
    """The word, the interval it rests on and why, in a clause."""

    word: Word
    effect: float | None
    interval: Interval | None
    """Of the finite pairs; None where there is none."""
    num_pairs: int
    num_infinite: int
    seeds_needed: int | None
    because: str


def make_rule(name: RuleName, value: float | Sequence[float], *, has_direction: bool = True) -> Rule:
    """The rule called `name` with its bound (a pair of bounds for `within`) already in effect space."""
    if name == "within":
        low, high = value  # type: ignore[misc]
        return Rule(name, float(low), float(high), False)
    bound = float(value)  # type: ignore[arg-type]
    if name in ("above", "at_least"):
        return Rule(name, bound, math.inf, has_direction)
    return Rule(name, -math.inf, bound, has_direction and name != "non_inferior_within")


def decide(rule: Rule, effects: Sequence[float], *, exact: bool = False) -> Decision:
    """The verdict of `rule` over one effect a seed; ±inf stands for a pair of which one run diverged.

    `exact` effects are facts and not samples: each must satisfy the rule, and one suffices.
    """
    finite = [effect for effect in effects if math.isfinite(effect)]
    infinite = [effect for effect in effects if math.isinf(effect)]
    if len(finite) + len(infinite) != len(effects):
        raise ValueError("an effect is NaN; leave undefined pairs out before deciding")
    if not effects:
        return Decision("not run", None, None, 0, 0, None, "no pair of finished runs")
    if exact and not infinite:
        return _decide_exact(rule, effects)
    if not finite:
        return _decide_infinite(rule, infinite)
    interval = paired_interval(finite, rule.confidence)
    word, because, seeds_needed = _decide_finite(rule, interval)
    if infinite and not _survives(rule, word, interval, infinite):
        word, seeds_needed = "inconclusive", None
        because = "the pairs without a diverged run do not decide this by themselves"
    return Decision(
        word,
        interval.mean,
        interval,
        len(effects),
        len(infinite),
        seeds_needed if word == "inconclusive" else None,
        because,
    )


def _decide_exact(rule: Rule, effects: Sequence[float]) -> Decision:
    """All runs of an exact statistic agree; one that does not is a finding, and differs."""
    # A ratio's effect is a difference of logarithms, which rounds.
    inside = all(
        rule.admits(effect)
        or (rule.name == "within" and any(math.isclose(effect, b, rel_tol=1e-12) for b in rule.bounds))
        for effect in effects
    )
    if max(effects) > min(effects):
        because = f"an exact value, which yet differs between runs ({min(effects):.6g} to {max(effects):.6g})"
        return Decision(
            "differs" if not inside else "inconclusive", effects[0], None, len(effects), 0, None, because
        )
    word: Word = "reproduced" if inside else "differs"
    return Decision(
        word, effects[0], None, len(effects), 0, None, "an exact value, not a sample, so one run decides"
    )


def decide_worst(rule: Rule, effects: Sequence[float]) -> Decision:
    """The verdict of `rule` over the largest differences of the seeds: the largest of them all must satisfy it."""
    if not effects:
        return Decision("not run", None, None, 0, 0, None, "no pair of finished runs")
    worst = max(effects)
    word: Word = "reproduced" if rule.admits(worst) else "differs"
    because = "the largest of all differences, so every pair of runs keeps the bound"
    if word == "differs":
        because = "the largest of all differences, and one beyond the bound decides"
    return Decision(word, worst, None, len(effects), 0, None, because)


def _decide_finite(rule: Rule, interval: Interval) -> tuple[Word, str, int | None]:
    low, high = interval.low, interval.high
    if not interval.bounded:
        return "inconclusive", "one value has no spread; at least 2 seeds are needed for any interval", 2
    if rule.admits(low) and rule.admits(high):
        return "reproduced", _placed(rule, True), None
    direction = _direction(rule, interval)
    if _all_outside(rule, low, high):
        if direction:
            return (
                "direction reproduced",
                "on the claimed side of no effect throughout, but smaller than claimed",
                None,
            )
        return "differs", _placed(rule, False), None
    if direction:
        return (
            "direction reproduced",
            "on the claimed side of no effect throughout; the claimed size stays open",
            None,
        )
    return "inconclusive", "the interval reaches across the bound", _seeds_needed(rule, interval)


def _all_outside(rule: Rule, low: float, high: float) -> bool:
    """Whether no value of the interval satisfies the rule."""
    strict = rule.name in ("above", "below", "non_inferior_within")
    return (high <= rule.low or low >= rule.high) if strict else (high < rule.low or low > rule.high)


def _direction(rule: Rule, interval: Interval) -> bool:
    if not rule.has_direction:
        return False
    if rule.name in ("above", "at_least"):
        return rule.low >= 0 and interval.low > 0
    return rule.high <= 0 and interval.high < 0


def _placed(rule: Rule, inside: bool) -> str:
    if rule.name == "within":
        return "inside the claimed range throughout" if inside else "outside the claimed range throughout"
    if rule.name == "non_inferior_within":
        return "worse by less than the margin" if inside else "worse by more than the margin"
    upwards = rule.name in ("above", "at_least")
    return f"{'above' if inside == upwards else 'below'} the bound throughout"


def _seeds_needed(rule: Rule, interval: Interval) -> int | None:
    """Pairs that would decide if mean and spread stay as they are; always more than there were."""
    distance = min(abs(interval.mean - bound) for bound in rule.bounds)
    # Inside a range both ends must be cleared: a tenth of the power is lost at either at most.
    power = 0.9 if rule.name == "within" and rule.admits(interval.mean) else 0.8
    needed = pairs_to_decide(distance, interval.sd, (1 - rule.confidence) / 2, power)
    return None if needed is None else max(needed, interval.num_pairs + 1)


def _decide_infinite(rule: Rule, infinite: Sequence[float]) -> Decision:
    count = len(infinite)
    if len(set(infinite)) > 1:
        return Decision(
            "inconclusive", None, None, count, count, None, "pairs are infinite in both directions"
        )
    effect = infinite[0]
    if count == 1:
        return Decision(
            "inconclusive", effect, None, 1, 1, 2, "one diverged pair could be chance; at least 2 are needed"
        )
    inside = rule.high == math.inf if effect > 0 else rule.low == -math.inf
    word: Word = "reproduced" if inside else "differs"
    return Decision(
        word, effect, None, count, count, None, f"all {count} pairs have a diverged run on the same side"
    )


def _survives(rule: Rule, word: Word, interval: Interval, infinite: Sequence[float]) -> bool:
    """Whether pairs at ±inf point the same way as what the finite ones decided."""
    if len(set(infinite)) > 1:
        return False
    upwards = infinite[0] > 0
    if word in ("reproduced", "direction reproduced"):
        return rule.high == math.inf if upwards else rule.low == -math.inf
    if word == "differs":
        return interval.low >= rule.high if upwards else interval.high <= rule.low
    return False
