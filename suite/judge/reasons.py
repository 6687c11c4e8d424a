"""The sentences of a verdict: its numbers and rule, then what was left out, diverged or averaged."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from results.records import digits_between
from suite.judge.decision import Decision, RuleName
from suite.judge.measures import Measure
from suite.judge.pairing import Pair, Unit
from suite.judge.verdict import format_effect

if TYPE_CHECKING:
    from results.records import RunRow
    from suite.declare import Claim, PlannedRun


EXACT_DIGITS = 6
"""Significant digits of what is exact, and of bounds that somebody wrote."""


def expectation(claim: Claim) -> tuple[RuleName, Any]:
    """Name and bound of the one rule that the claim's `expect` gives."""
    given: dict[str, Any] = claim.expect.model_dump(exclude_none=True)
    ((name, value),) = given.items()
    return name, value  # type: ignore[return-value]


def summary(claim: Claim, measure: Measure, decision: Decision) -> str:
    """Effect, interval, what was claimed and how the one lies to the other, in one clause."""
    name, bound = expectation(claim)
    if decision.effect is None:
        return f"{claim.measure} is undefined: {decision.because}"
    back = math.exp if measure.comparison == "ratio" else float
    wanted = f"claimed {_bound_text(name, bound, measure.unit)}"
    if decision.interval is None and math.isfinite(decision.effect):
        value = format_effect(back(decision.effect), measure.unit, EXACT_DIGITS)
        return f"{claim.measure} is {value} ({wanted}): {decision.because}"
    if decision.interval is None:
        value = "infinite" if decision.effect > 0 else "minus infinite"
        return f"{claim.measure} is {value} ({wanted}): {decision.because}"
    effect, interval = back(decision.effect), decision.interval
    pairs = _count(interval.num_pairs, "pair" if measure.comparison else "seed")
    low, high = back(interval.low), back(interval.high)
    digits = digits_between(low, high)
    text = f"{claim.measure} is {format_effect(effect, measure.unit, digits)}"
    if not interval.bounded:
        return f"{text} in {pairs} ({wanted}): {decision.because}"
    ends = f"{low:.{digits}g} to {high:.{digits}g}"
    text += f", {interval.confidence:.0%} interval {ends} over {pairs} ({wanted}): {decision.because}"
    if decision.word != "inconclusive" or decision.num_infinite:
        return text
    if decision.seeds_needed is None:
        return f"{text}; no affordable number of pairs would decide an effect so close to the bound"
    return f"{text}; about {decision.seeds_needed} pairs would decide if mean and spread stay as they are"


def _bound_text(name: str, bound: Any, unit: str) -> str:
    if name == "within" and bound[0] == bound[1]:
        return f"exactly {format_effect(bound[0], unit, EXACT_DIGITS)}"
    if name == "within":
        low = f"{bound[0]:,.0f}" if unit == "bytes" and abs(bound[0]) >= 1e5 else f"{bound[0]:g}"
        return f"within {low} to {format_effect(bound[1], unit, EXACT_DIGITS)}"
    words = {"non_inferior_within": "non-inferior within", "at_least": "at least", "at_most": "at most"}
    return f"{words.get(name, name)} {format_effect(bound, unit, EXACT_DIGITS)}"


def divergence_notes(
    pairs: Sequence[Pair], runs: Sequence[PlannedRun], rows: Mapping[str, RunRow]
) -> list[str]:
    """How many pairs hold a diverged run, and which runs those are."""
    infinite = [pair for pair in pairs if math.isinf(pair.effect)]
    if not infinite:
        return []
    diverged = [run for run in runs if run.key in rows and rows[run.key].status == "diverged"]
    names = Counter(arm_name(run) for run in diverged)
    listed = ", ".join(f"{count} of {arm}" for arm, count in names.items())
    others = "" if len(infinite) == len(pairs) else "; the interval is that of the others"
    return [f"{len(infinite)} of {len(pairs)} pairs hold a diverged run ({listed}){others}"]


def missing_notes(
    units: Sequence[Unit],
    pairs: Sequence[Pair],
    runs: Sequence[PlannedRun],
    values: Mapping[str, object],
    rows: Mapping[str, RunRow],
    measure: Measure,
) -> list[str]:
    """Which seeds are left out of the pairs and why."""
    left_out = sorted({unit.seed for unit in units} - {pair.seed for pair in pairs})
    if not left_out:
        return []
    causes = []
    for run in runs:
        if run.spec.seed not in left_out or run.key in values:
            continue
        row = rows.get(run.key)
        if row is None:
            causes.append(f"{arm_name(run)} has not run")
        elif row.status == "ok":
            causes.append(f"{arm_name(run)} recorded no {recorded_as(measure)}")
        else:
            causes.append(f"{arm_name(run)} is {row.status}" + (f" ({row.reason})" if row.reason else ""))
    seeds = f"seed{'' if len(left_out) == 1 else 's'} {', '.join(str(seed) for seed in left_out)}"
    causes = list(dict.fromkeys(causes)) or [
        "the effect is undefined: both sides diverged, or a ratio of values not above 0"
    ]
    more = f" and {len(causes) - 3} more" if len(causes) > 3 else ""
    return [f"{seeds} left out: {'; '.join(causes[:3])}{more}"]


def recorded_as(measure: Measure) -> str:
    """The metric, with the scopes that are read of it where not all are."""
    scopes = ":".join(filter(None, (measure.scope, measure.against_scope)))
    return measure.statistic.metric + (f"[{scopes}]" if scopes not in ("", "*") else "")


def averaging_notes(units: Sequence[Unit]) -> list[str]:
    """Which labels the claim leaves open, so that a seed's effect is a mean over them."""
    values: dict[str, set[Any]] = {}
    for unit in units:
        for label, value in unit.open_labels:
            values.setdefault(label, set()).add(value)
    several = [label for label, seen in values.items() if len(seen) > 1]
    return [f"effects of one seed are averaged over {' and '.join(several)} first"] if several else []


def base_notes(runs: Sequence[PlannedRun]) -> list[str]:
    """A caution where one base stands under all seeds: they sample less than independent runs would."""
    bases = {run.spec.start_from.key if run.spec.start_from is not None else None for run in runs}
    seeds = {run.spec.seed for run in runs}
    if len(seeds) > 1 and len(bases) == 1 and None not in bases:
        return ["all runs start from one base, so seeds differ in what came after it alone"]
    return []


def arm_name(run: PlannedRun) -> str:
    """The run's labels but its seed, in words: `fp8-delayed static-16`."""
    return " ".join(str(value) for label, value in run.labels.items() if label != "seed") or run.key


def sentence(text: str) -> str:
    """With a full stop; the first letter stays, since it often begins a name."""
    return text if text.endswith(".") else f"{text}."


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
