"""One step's memory three times side by side: by formula, by trace, on real tensors, and what lies between them.

A configuration is what runs of the studies `ledger`, `trace` and `step` have in common. Rows are the peak by category,
the bytes between steps and those kept for the backward pass, each of the rank that has most. Differences are against
the measurement where there is one, else against the trace, and in parts of its peak: so they add up to the total's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.ledger.step import CATEGORIES, STATES
from suite.report.evidence import Evidence, Points
from suite.report.words import NOTHING, byte_text, labels_text, number, plural, signed

if TYPE_CHECKING:
    from suite.declare import Plan, PlannedRun

SOURCES = ("ledger", "trace", "step")
"""Studies of one step, from the cheapest to the dearest."""
COLUMNS = {
    "ledger": ("formula", "predicted"),
    "trace": ("trace", "simulated"),
    "step": ("measured", "native"),
}
"""Study -> its column and the fidelity of what stands there."""
TOTAL = "total"
WORTH_NAMING = 0.001
"""Part of the peak from which on a difference is worth saying where it lies."""
STEP_METRICS = ("peak_bytes", "state_bytes", "saved_bytes")


@dataclass(frozen=True)
class Difference:
    """One source against the reference."""

    text: str
    is_exact: bool


@dataclass(frozen=True)
class Row:
    """One category: an amount for each source, a difference for each but the reference."""

    group: str
    name: str
    amounts: tuple[str, ...]
    exact_amounts: tuple[str, ...]
    """The same to the byte, for those who ask."""
    differences: tuple[Difference, ...]
    is_total: bool = False


@dataclass(frozen=True)
class Configuration:
    """One configuration, ready for its template."""

    name: str
    total: Row
    rows: tuple[Row, ...]
    residue: str
    """Where most of the total's difference lies; "" where it is next to nothing."""


@dataclass(frozen=True)
class Reconciliation:
    """The section; `configurations` is empty where no two sources can be compared."""

    columns: tuple[tuple[str, str], ...]
    """(name, fidelity)"""
    compared: tuple[str, ...]
    reference: str
    configurations: tuple[Configuration, ...]
    sentences: tuple[str, ...]


def configurations(plan: Plan) -> dict[str, dict[str, PlannedRun]]:
    """Configuration in words -> study -> run, of the studies of one step; of the first seed, for they do not sample."""
    found: dict[tuple[tuple[str, Any], ...], dict[str, PlannedRun]] = {}
    for run in plan.runs:
        if run.role == "arm" and run.spec.task in SOURCES:
            labels = tuple(
                (name, value) for name, value in run.labels.items() if name not in ("task", "seed")
            )
            found.setdefault(labels, {}).setdefault(run.spec.task, run)
    varied = _varied(found)
    named: dict[str, dict[str, PlannedRun]] = {}
    for labels, runs in found.items():
        name = labels_text({axis: value for axis, value in labels if axis in varied}) or "all runs"
        named.setdefault(name, {}).update(
            {task: run for task, run in runs.items() if task not in named.get(name, {})}
        )
    return named


def _varied(found: Iterable[tuple[tuple[str, Any], ...]]) -> set[str]:
    """Axes that take more than one value, or that only some configurations have."""
    values: dict[str, set[str]] = {}
    counts: dict[str, int] = {}
    total = 0
    for labels in found:
        total += 1
        for axis, value in labels:
            values.setdefault(axis, set()).add(str(value))
            counts[axis] = counts.get(axis, 0) + 1
    return {axis for axis, seen in values.items() if len(seen) > 1 or counts[axis] < total}


def reconciliation(plan: Plan, evidence: Evidence) -> Reconciliation:
    """The table of the plan's studies of one step, as far as they have run."""
    named = configurations(plan)
    keys = [run.key for runs in named.values() for run in runs.values()]
    points = evidence.points([key for key in keys if evidence.status(key) == "ok"], *STEP_METRICS)
    amounts = {
        name: {task: found for task, run in runs.items() if (found := _amounts(points, run.key))}
        for name, runs in named.items()
    }
    amounts = {name: sources for name, sources in amounts.items() if len(sources) > 1}
    shown = tuple(task for task in SOURCES if any(task in sources for sources in amounts.values()))
    reference = shown[-1] if shown else ""
    return Reconciliation(
        columns=tuple(COLUMNS[task] for task in shown),
        compared=tuple(COLUMNS[task][0] for task in shown if task != reference),
        reference=COLUMNS[reference][0] if reference else "",
        configurations=tuple(_configuration(name, each, shown) for name, each in amounts.items()),
        sentences=tuple(_sentences(amounts)),
    )


Amounts = Mapping[tuple[str, str], float]
"""(group, category) -> bytes of one source."""
_GROUPS = {
    "peak_bytes": "at the peak",
    "state_bytes": "between steps",
    "saved_bytes": "for the backward pass",
}


def _amounts(points: Points, key: str) -> dict[tuple[str, str], float]:
    found: dict[tuple[str, str], float] = {}
    for metric, group in _GROUPS.items():
        for scope, curve in points.scopes(metric, key).items():
            if scope.startswith("rank") or (metric == "saved_bytes" and scope):
                continue
            found[group, scope or "all kept"] = max(value for _, value in curve)
    return found


def _order(sources: Mapping[str, Amounts]) -> list[tuple[str, str]]:
    peak, between, kept = _GROUPS.values()
    known = [(peak, name) for name in CATEGORIES] + [(peak, TOTAL)]
    named = {place for found in sources.values() for place in found}
    other = sorted(place for place in named if place[0] == peak and place not in known)
    places = [*known, *other, *((between, name) for name in STATES), (kept, "all kept")]
    return [place for place in places if place in named]


def _configuration(name: str, sources: Mapping[str, Amounts], shown: tuple[str, ...]) -> Configuration:
    reference = max(sources, key=SOURCES.index)
    peak = sources[reference].get((_GROUPS["peak_bytes"], TOTAL), 0.0)
    rows = [_row(place, sources, reference, shown, peak) for place in _order(sources)]
    total = next((row for row in rows if row.is_total), rows[0])
    return Configuration(name, total, tuple(rows), _residue(sources, reference))


def _row(
    place: tuple[str, str],
    sources: Mapping[str, Amounts],
    reference: str,
    shown: tuple[str, ...],
    peak: float,
) -> Row:
    values = [sources.get(task, {}).get(place) for task in shown]
    whole = sources[reference].get(place)
    differences = tuple(
        _difference(sources.get(task, {}).get(place), whole, peak, same=task == reference)
        for task in shown
        if task != shown[-1]
    )
    return Row(
        group=place[0],
        name=place[1],
        amounts=tuple(byte_text(value) for value in values),
        exact_amounts=tuple(NOTHING if value is None else f"{value:,.0f} bytes" for value in values),
        differences=differences,
        is_total=place == (_GROUPS["peak_bytes"], TOTAL),
    )


def _difference(value: float | None, reference: float | None, peak: float, *, same: bool) -> Difference:
    if value is None or reference is None or same:
        return Difference(NOTHING, False)
    gap = value - reference
    if not gap:
        return Difference("exact", True)
    part = f" ({signed(100 * gap / peak, 2)}\N{NO-BREAK SPACE}%)" if peak else ""
    return Difference(f"{'+' if gap > 0 else ''}{byte_text(gap)}{part}", False)


def _residue(sources: Mapping[str, Amounts], reference: str) -> str:
    """The category that holds most of the difference between the cheapest source and the reference."""
    peak = _GROUPS["peak_bytes"]
    source = next(task for task in SOURCES if task in sources)
    mine, whole = sources[source], sources[reference]
    gap = mine.get((peak, TOTAL), 0.0) - whole.get((peak, TOTAL), 0.0)
    if source == reference or abs(gap) < WORTH_NAMING * whole.get((peak, TOTAL), 0.0):
        return ""
    gaps = {name: mine.get((peak, name), 0.0) - whole.get((peak, name), 0.0) for name in CATEGORIES}
    largest = max(gaps, key=lambda name: abs(gaps[name]))
    return f"mostly {largest}" if abs(gaps[largest]) >= abs(gap) / 2 else "spread over categories"


def _sentences(amounts: Mapping[str, Mapping[str, Amounts]]) -> Iterable[str]:
    """What the whole table says: the largest difference of each pair of sources."""
    peak = (_GROUPS["peak_bytes"], TOTAL)
    for source, reference in (("ledger", "step"), ("trace", "step"), ("ledger", "trace")):
        errors = {
            name: each[source][peak] / each[reference][peak] - 1
            for name, each in amounts.items()
            if peak in each.get(source, {}) and each.get(reference, {}).get(peak)
        }
        if errors:
            worst = max(errors, key=lambda name: abs(errors[name]))
            where = f" ({worst})" if len(errors) > 1 and errors[worst] else ""
            size = (
                f"at most {number(100 * abs(errors[worst]), 2)}\N{NO-BREAK SPACE}%"
                if errors[worst]
                else "not at all"
            )
            yield (
                f"In {plural(len(errors), 'configuration')} the peaks by {COLUMNS[source][0]} and "
                f"{'trace' if reference == 'trace' else 'measurement'} differ by {size}{where}."
            ).replace("differ by not", "differ not")
    states = [_states_equal(each) for each in amounts.values()]
    compared = [each for each in states if each is not None]
    if compared:
        yield (
            "Weights, gradients and optimizer states by formula are those measured, to the byte, in "
            f"{sum(compared)} of {plural(len(compared), 'configuration')}."
        )


def _states_equal(sources: Mapping[str, Amounts]) -> bool | None:
    places = [(_GROUPS["state_bytes"], name) for name in STATES]
    if "ledger" not in sources or "step" not in sources or places[0] not in sources["step"]:
        return None
    return all(sources["ledger"].get(place) == sources["step"].get(place) for place in places)
