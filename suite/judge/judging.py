"""From a plan and the database to a verdict on every claim. Reads; never writes, never trains.

A claim is judged in four steps: can it be decided at this size at all (`blocker`), which runs stand side by
side (`pairing`), what did they measure (`measures`), and what does the claim's rule say of it (`decision`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from harness.precision.backends.requirements import native_requirements
from harness.spec.tasks import EMULATED_STUDIES, EXACT_STUDIES
from suite.judge.decision import Decision, Rule, decide, decide_worst, make_rule
from suite.judge.fits import TermError, coefficients_by_seed, read_terms
from suite.judge.measures import Measure, UnknownMeasureError, find_measure
from suite.judge.pairing import Pair, Unit, make_units, pair_by_seed, unpaired_labels, value_of_run
from suite.judge.reasons import (
    arm_name,
    averaging_notes,
    base_notes,
    divergence_notes,
    expectation,
    missing_notes,
    sentence,
    summary,
)
from suite.judge.verdict import Verdict
from suite.judge.worst import by_place, worst_pairs

if TYPE_CHECKING:
    from harness.spec import Fidelity, RunSpec
    from results.records import RunRow
    from results.store import Store
    from suite.declare import Claim, Plan, PlannedRun

FIDELITIES = ("native", "emulated", "simulated", "predicted")
"""From the best to the least."""
ENVIRONMENT = ("machine", "gpu", "driver", "torch")
"""What the runs of a pair must have in common."""
SPEED_RULE = "speed is judged on native runs alone"


def judge(plan: Plan, store: Store) -> list[Verdict]:
    """One verdict for each claim of the plan's case, in the case's order."""
    keys = [run.key for run in plan.runs]
    evidence = Evidence(store, keys)
    return [judge_claim(plan, claim, evidence) for claim in plan.case.claims]


class Evidence:
    """What the database holds on a plan's runs; each metric is read once."""

    def __init__(self, store: Store, keys: Sequence[str]) -> None:
        self._store, self._keys = store, list(keys)
        self.rows: dict[str, RunRow] = store.status_of(self._keys)
        self._points: dict[str, dict[str, list[tuple[str, int, float]]]] = {}
        self._environments: dict[str, dict[str, Any]] = {}

    def points(self, metric: str, key: str) -> list[tuple[str, int, float]]:
        """(scope, step, value) of one metric of one run."""
        if metric not in self._points:
            by_key: dict[str, list[tuple[str, int, float]]] = {}
            for run_key, _, scope, step, value in self._store.values(self._keys, [metric]):
                if value is not None:
                    by_key.setdefault(run_key, []).append((scope, step, value))
            self._points[metric] = by_key
        return self._points[metric].get(key, [])

    def environment(self, key: str) -> dict[str, Any]:
        """Machine, GPU, driver and torch version of the run that counts for `key`; empty where not known."""
        row = self.rows.get(key)
        if row is None or row.environment_id is None:
            return {}
        if row.environment_id not in self._environments:
            stored = self._store.environment(row.environment_id) or {}
            self._environments[row.environment_id] = {name: stored.get(name) for name in ENVIRONMENT}
        return self._environments[row.environment_id]

    @cached_property
    def machine(self) -> str:
        """The machines that the plan's runs ran on; this one where nothing has run."""
        machines = {self.environment(key).get("machine") for key in self.rows} - {None}
        if machines:
            return ", ".join(sorted(map(str, machines)))
        from results.environment import describe_environment

        return str(describe_environment()["machine"])


def blocker(claim: Claim, plan: Plan) -> str | None:
    """Why no run of this plan could decide the claim, or None. `suite plan` asks it, without a database."""
    try:
        measure = find_measure(claim.measure)
    except UnknownMeasureError as error:
        return str(error)
    if bool(measure.comparison) != (claim.against is not None):
        name = measure.statistic.name
        return (
            f"{claim.measure} compares two runs and the claim has no `against`"
            if measure.comparison
            else f"the claim has an `against`, so its measure must be {name}_gap or {name}_ratio"
        )
    if reason := _bad_bound(claim, measure) or _bad_fit(claim, measure):
        return reason
    for side, where in (("of", claim.of), ("against", claim.against)):
        if where is not None and not plan.select(where):
            chosen = ", ".join(f"{label} {value}" for label, value in where.items())
            return f"size {plan.size} has no run with {chosen} (`{side}`)"
    if measure.is_speed and (sharing := sum(run.spec.shares_cores for run in _selected(claim, plan))):
        return f"{_counted(sharing)} ranks that share one CPU, whose time is no speed of the scheme; GPUs would do"
    why = _why_native(claim, measure)
    if why and (lesser := _not_native(_selected(claim, plan))):
        return f"{why}, and {lesser}; {_hardware_for(_selected(claim, plan))}"
    return None


def _bad_bound(claim: Claim, measure: Measure) -> str | None:
    """Why the claim's rule has no meaning for its measure, or None."""
    name, value = expectation(claim)
    if measure.is_worst:
        is_bound = name in ("at_most", "below")
        return None if is_bound else f"{claim.measure} is a largest difference; its rule is at_most or below"
    if name == "non_inferior_within":
        if not measure.comparison:
            return f"non_inferior_within compares runs; the measure must be {measure.name}_gap or _ratio"
        if measure.comparison == "ratio" and value >= 1:
            return f"non_inferior_within of a ratio must be below 1 (got {value:g})"
    elif measure.comparison == "ratio" and min(value if isinstance(value, list | tuple) else [value]) <= 0:
        return f"the bound of a ratio must be above 0 (got {value})"
    return None


def _bad_fit(claim: Claim, measure: Measure) -> str | None:
    """Why the claim's `fit` has no meaning, or None."""
    if claim.fit is None:
        return None
    if measure.comparison:
        return f"a fit is of single runs, and {claim.measure} compares two"
    try:
        read_terms(claim.fit)
    except TermError as error:
        return f"fit: {error}"
    return None


def is_exact(measure: Measure, runs: Iterable[PlannedRun]) -> bool:
    """Whether one run decides: a fact by itself, or a count of a study that counts and does not sample."""
    counted = measure.statistic.metric in ("peak_bytes", "live_bytes")
    return measure.is_exact or (counted and all(run.spec.task in EXACT_STUDIES for run in runs))


def _why_native(claim: Claim, measure: Measure) -> str | None:
    """Why runs of lesser fidelity cannot decide the claim; None where they can."""
    if claim.needs == "native":
        return "the claim needs native runs"
    return SPEED_RULE if measure.is_speed else None


def judge_claim(plan: Plan, claim: Claim, evidence: Evidence) -> Verdict:
    """The verdict on one claim of the plan's case."""
    verdict = Verdict(
        plan.case.name,
        plan.size,
        claim.id,
        "not run",
        "",
        claim.measure,
        machine=evidence.machine,
        claim=claim.model_dump(mode="json"),
    )
    if reason := blocker(claim, plan):
        return replace(verdict, reason=sentence(reason))
    measure = find_measure(claim.measure)
    against = None if claim.against is None else plan.select(claim.against)
    units, single = make_units(plan.select(claim.of), against, unpaired_labels(claim))
    runs = _unique(run for unit in units for run in unit.runs)
    stored = [run for run in runs if run.key in evidence.rows]
    verdict = replace(
        verdict,
        unit=measure.unit,
        run_keys=tuple(run.key for run in runs),
        fidelity=_worst_fidelity(runs, evidence),
    )
    if not units:
        return replace(
            verdict, reason="No run of `of` has a partner in `against` with the same seed and labels."
        )
    if not stored:
        return replace(verdict, reason=f"None of the {len(runs)} runs of this claim has run yet.")
    if (why := _why_native(claim, measure)) and verdict.fidelity != "native":
        return replace(verdict, reason=sentence(f"{why}; at least one run here was {verdict.fidelity}"))
    if mixed := _mixed_environments(units, evidence):
        return replace(verdict, verdict="not comparable", reason=mixed)

    pairs, decision, notes = _weigh(claim, measure, units, stored, evidence)
    notes += base_notes(runs)
    if single:
        notes.append(
            "1 run has no partner and is left out"
            if len(single) == 1
            else f"{len(single)} runs have no partner and are left out"
        )
    back = math.exp if measure.comparison == "ratio" else float
    interval = decision.interval
    bounded = interval is not None and interval.bounded
    return replace(
        verdict,
        verdict=decision.word,
        effect=None if decision.effect is None else back(decision.effect),
        low=back(interval.low) if interval is not None and bounded else None,
        high=back(interval.high) if interval is not None and bounded else None,
        confidence=interval.confidence if interval is not None and bounded else None,
        num_pairs=decision.num_pairs,
        seeds_needed=decision.seeds_needed,
        pairs=tuple(pairs),
        reason=" ".join(
            sentence(part)
            for part in (summary(claim, measure, decision), *(note[:1].upper() + note[1:] for note in notes))
        ),
    )


def _weigh(
    claim: Claim, measure: Measure, units: Sequence[Unit], stored: Sequence[PlannedRun], evidence: Evidence
) -> tuple[list[Pair], Decision, list[str]]:
    """The pairs with their effects, what the rule says of them, and what is to be said beside it."""
    runs = _unique(run for unit in units for run in unit.runs)
    rule, metric = _rule(claim, measure), measure.statistic.metric
    compared_with = {run.key for unit in units for run in unit.against}
    read_as = {run.key: measure.of_against if run.key in compared_with else measure for run in stored}
    if measure.is_worst:
        curves, compared = (
            {
                run.key: by_place(points)
                for run in stored
                if evidence.rows[run.key].status in ("ok", "diverged")
                and (points := side.chosen(evidence.points(metric, run.key)))
            }
            for side in (measure, measure.of_against)
        )
        pairs, where = worst_pairs(units, curves, compared, measure.comparison)
        known = curves | {key: compared[key] for key in compared_with if key in compared}
        notes = missing_notes(units, pairs, runs, known, evidence.rows, measure)
        return (
            pairs,
            decide_worst(rule, [pair.effect for pair in pairs]),
            [*([where] if where else []), *notes],
        )
    values = {}
    for run in stored:
        points = evidence.points(metric, run.key)
        value = value_of_run(read_as[run.key], evidence.rows[run.key].status, points, run.spec.num_steps)
        if value is not None:
            values[run.key] = value
    if claim.fit is not None:
        pairs, fitted = coefficients_by_seed(units, values, read_terms(claim.fit))
        notes = [*fitted, *missing_notes(units, pairs, runs, values, evidence.rows, measure)]
        return pairs, decide(rule, [pair.effect for pair in pairs], exact=is_exact(measure, runs)), notes
    pairs = pair_by_seed(units, values, measure.comparison)
    decision = decide(rule, [pair.effect for pair in pairs], exact=is_exact(measure, runs))
    if not pairs and all(run.key in values for run in runs):
        decision = replace(decision, word="inconclusive", because="every pair's effect is undefined")
    notes = [
        *divergence_notes(pairs, runs, evidence.rows),
        *missing_notes(units, pairs, runs, values, evidence.rows, measure),
        *averaging_notes(units),
    ]
    return pairs, decision, notes


def _rule(claim: Claim, measure: Measure) -> Rule:
    """The claim's rule in effect space: ratios as logarithms, a margin on the worse side of no difference."""
    name, value = expectation(claim)
    has_direction = measure.has_direction
    if name == "non_inferior_within":
        margin = float(value)
        if measure.direction != "higher":
            return make_rule(name, math.log1p(margin) if measure.comparison == "ratio" else margin)
        bound = math.log1p(-margin) if measure.comparison == "ratio" else -margin
        return Rule(name, bound, math.inf, False)
    if measure.comparison == "ratio":
        value = [math.log(bound) for bound in value] if isinstance(value, (list, tuple)) else math.log(value)
    return make_rule(name, value, has_direction=has_direction)


def _mixed_environments(units: Sequence[Unit], evidence: Evidence) -> str | None:
    for unit in units:
        seen: dict[tuple[tuple[str, Any], ...], PlannedRun] = {}
        for run in unit.runs:
            environment = evidence.environment(run.key)
            if environment:
                seen.setdefault(tuple(environment.items()), run)
        if unit.against and len(seen) > 1:
            (first, run), (second, other) = list(seen.items())[:2]
            unlike = ", ".join(
                f"{name} {mine} and {yours}"
                for (name, mine), (_, yours) in zip(first, second, strict=True)
                if mine != yours
            )
            arms = f"{arm_name(run)} and {arm_name(other)}"
            return f"Seed {unit.seed}: {arms} ran in different environments ({unlike})."
    return None


def _selected(claim: Claim, plan: Plan) -> list[PlannedRun]:
    return [*plan.select(claim.of), *(plan.select(claim.against) if claim.against is not None else [])]


def _counted(number: int) -> str:
    return "1 run has" if number == 1 else f"{number} runs have"


def _not_native(runs: Iterable[PlannedRun]) -> str | None:
    counts = Counter(_at_best(run.spec) for run in runs)
    lesser = [
        f"{count} of the {counts.total()} runs {_are(count)} {name}"
        for name, count in counts.items()
        if name != "native"
    ]
    return " and ".join(lesser) or None


def _at_best(spec: RunSpec) -> Fidelity:
    """What a run may turn out to be: on a GPU and with backend auto, the worker finds out."""
    is_open = spec.device == "cuda" and spec.precision.recipe is not None and spec.precision.backend == "auto"
    if is_open and spec.task not in EMULATED_STUDIES and native_requirements(spec.precision).is_possible:
        return "native"
    return spec.fidelity


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


def _hardware_for(runs: Iterable[PlannedRun]) -> str:
    """What native runs would take: the need of each recipe, each said once."""
    needs = {
        run.spec.precision.name: native_requirements(run.spec.precision)
        for run in runs
        if run.spec.precision.recipe is not None
    }
    if not needs:
        return "runs on the hardware itself would do"
    return "; ".join(
        f"{name} would take {each}" if each.is_possible else f"{name} has no native form ({each.reason})"
        for name, each in needs.items()
    )


def _worst_fidelity(runs: Sequence[PlannedRun], evidence: Evidence) -> str | None:
    seen = [
        evidence.rows[run.key].fidelity if run.key in evidence.rows else run.spec.fidelity for run in runs
    ]
    return max(seen, key=FIDELITIES.index) if seen else None


def _unique(runs: Iterable[PlannedRun]) -> list[PlannedRun]:
    return list({run.key: run for run in runs}.values())
