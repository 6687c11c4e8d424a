"""Collectives of one step beside their formulas: axis, operation, calls and bytes, measured, traced and predicted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.ledger.step import CONTROL
from suite.report.evidence import Evidence, Points
from suite.report.reconcile import COLUMNS, SOURCES, configurations
from suite.report.words import NOTHING, byte_text, plural

if TYPE_CHECKING:
    from suite.declare import Plan


@dataclass(frozen=True)
class Cell:
    """Calls and payload of one source."""

    count: str
    num_bytes: str
    exact: str
    """The bytes to the last one."""


@dataclass(frozen=True)
class VolumeRow:
    """One operation on one mesh axis."""

    operation: str
    cells: tuple[Cell, ...]
    agrees: str
    """`equal`, or what differs; "" where there is nothing to compare."""


@dataclass(frozen=True)
class VolumeGroup:
    """A configuration's operations."""

    name: str
    rows: tuple[VolumeRow, ...]


@dataclass(frozen=True)
class Volumes:
    """The section; `groups` is empty where no collective was recorded."""

    columns: tuple[tuple[str, str], ...]
    groups: tuple[VolumeGroup, ...]
    sentence: str


Calls = Mapping[str, tuple[float, float]]
"""axis.op -> (calls, bytes) of the rank that has most."""


def volume_section(plan: Plan, evidence: Evidence) -> Volumes:
    """The table of the plan's studies of one step, as far as they have run."""
    named = configurations(plan)
    keys = [run.key for runs in named.values() for run in runs.values() if evidence.status(run.key) == "ok"]
    points = evidence.points(keys, "comm_bytes", "comm_count")
    ran = set(keys)
    found = {
        name: {task: _calls(points, run.key) for task, run in runs.items() if run.key in ran}
        for name, runs in named.items()
    }
    found = {name: sources for name, sources in found.items() if any(sources.values())}
    shown = tuple(task for task in SOURCES if any(task in sources for sources in found.values()))
    groups = tuple(VolumeGroup(name, _rows(sources, shown)) for name, sources in found.items())
    agreements = [row.agrees for group in groups for row in group.rows if row.agrees]
    equal = agreements.count("equal")
    sentence = (
        f"Calls and bytes agree in {equal} of {plural(len(agreements), 'operation')} of "
        f"{plural(len(groups), 'configuration')}."
        if agreements
        else ""
    )
    return Volumes(tuple(COLUMNS[task] for task in shown), groups, sentence)


def _calls(points: Points, key: str) -> dict[str, tuple[float, float]]:
    sizes, counts = points.scopes("comm_bytes", key), points.scopes("comm_count", key)
    return {
        scope: (_last(counts.get(scope, [])), _last(curve))
        for scope, curve in sizes.items()
        if not scope.startswith("rank") and CONTROL not in scope.split(".")
    }


def _last(curve: list[tuple[int, float]]) -> float:
    return curve[-1][1] if curve else 0.0


def _rows(sources: Mapping[str, Calls], shown: tuple[str, ...]) -> tuple[VolumeRow, ...]:
    operations = sorted({scope for calls in sources.values() for scope in calls})
    return tuple(
        VolumeRow(
            scope,
            tuple(
                _cell(sources[task].get(scope, (0.0, 0.0))) if task in sources else _NONE for task in shown
            ),
            _agreement({task: calls.get(scope, (0.0, 0.0)) for task, calls in sources.items()}),
        )
        for scope in operations
    )


_NONE = Cell(NOTHING, NOTHING, "")


def _cell(calls: tuple[float, float]) -> Cell:
    count, num_bytes = calls
    return Cell(f"{count:,.0f}", byte_text(num_bytes), f"{num_bytes:,.0f} bytes")


def _agreement(values: Mapping[str, tuple[float, float]]) -> str:
    if len(values) < 2:
        return ""
    counts = {count for count, _ in values.values()}
    sizes = {num_bytes for _, num_bytes in values.values()}
    wrong = [name for name, seen in (("calls", counts), ("bytes", sizes)) if len(seen) > 1]
    return f"{' and '.join(wrong)} differ" if wrong else "equal"
