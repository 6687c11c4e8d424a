"""Every planned run as a cell with its status: what failed or never started is shown, not left out."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from markupsafe import Markup

from suite.report.arms import Layout
from suite.report.evidence import Evidence
from suite.report.svg import share_bar
from suite.report.words import STATUSES, join, number, plural

if TYPE_CHECKING:
    from suite.declare import PlannedRun

_ENDED_BADLY = tuple(name for name in STATUSES if name not in ("ok", "not run"))


@dataclass(frozen=True)
class RunCell:
    """One run: its status and, where it ended well, its final loss."""

    key: str
    href: str
    """Name of the run's page below runs/; "" where it never started."""
    status: str
    shape: str
    text: str
    reason: str


@dataclass(frozen=True)
class OutcomeRow:
    """The seeds of one arm."""

    name: str
    panel: str
    cells: tuple[RunCell | None, ...]


@dataclass(frozen=True)
class Failure:
    """A run that did not end well, with its reason in full."""

    name: str
    key: str
    status: str
    shape: str
    reason: str


@dataclass(frozen=True)
class Outcomes:
    """The matrix of runs, the bases apart, and the failures spelled out."""

    seeds: tuple[int, ...]
    bases: tuple[RunCell, ...]
    rows: tuple[OutcomeRow, ...]
    failures: tuple[Failure, ...]
    counts: tuple[tuple[str, str, int], ...]
    """(status, shape, how many), in the order of STATUSES."""
    bar: Markup
    sentence: str


def outcome_section(layout: Layout, evidence: Evidence, losses: Mapping[str, float]) -> Outcomes:
    """`losses` is each run's final loss, where it has one."""
    rows = []
    for arm in layout.arms:
        by_seed = arm.by_seed
        cells = tuple(
            _cell(by_seed[seed], evidence, losses.get(by_seed[seed].key)) if seed in by_seed else None
            for seed in layout.seeds
        )
        rows.append(OutcomeRow(arm.name, arm.panel, cells))
    named = [(run, "base run") for run in layout.bases]
    named += [(run, f"{arm.full_name}, seed {run.spec.seed}") for arm in layout.arms for run in arm.runs]
    counts = status_counts(evidence, (run.key for run, _ in named))
    return Outcomes(
        seeds=layout.seeds,
        bases=tuple(_cell(run, evidence, None) for run in layout.bases),
        rows=tuple(rows),
        failures=tuple(f for run, name in named if (f := _failure(run, name, evidence))),
        counts=counts,
        bar=counts_bar(counts),
        sentence=counts_text(counts),
    )


def status_counts(evidence: Evidence, keys: Iterable[str]) -> tuple[tuple[str, str, int], ...]:
    """How many of the runs have each status, absent ones left out."""
    seen = Counter(evidence.status(key) for key in keys)
    return tuple((name, shape, seen[name]) for name, (shape, _) in STATUSES.items() if seen[name])


def counts_text(counts: Iterable[tuple[str, str, int]]) -> str:
    """`61 of 63 runs ok, 1 oom and 1 skipped`."""
    counts = list(counts)
    total = sum(count for _, _, count in counts)
    good = sum(count for name, _, count in counts if name == "ok")
    rest = join([f"{count} {name}" for name, _, count in counts if name != "ok"])
    return f"{good} of {plural(total, 'run')} ok" + (f", {rest}" if rest else "")


def counts_bar(counts: Iterable[tuple[str, str, int]]) -> Markup:
    """The counts as one thin bar."""
    counts = list(counts)
    return share_bar(
        [(f"st-{name.replace(' ', '-')}", count) for name, _, count in counts], counts_text(counts)
    )


def _cell(run: PlannedRun, evidence: Evidence, loss: float | None) -> RunCell:
    row = evidence.rows.get(run.key)
    status = evidence.status(run.key)
    finished = status == "ok" and loss is not None and math.isfinite(loss)
    return RunCell(
        key=run.key,
        href=f"{run.key}.html" if row else "",
        status=status,
        shape=STATUSES[status][0],
        text=number(loss, 4) if finished else status,
        reason=row.reason if row and row.reason else "",
    )


def _failure(run: PlannedRun, name: str, evidence: Evidence) -> Failure | None:
    row = evidence.rows.get(run.key)
    if row is None or row.status not in _ENDED_BADLY:
        return None
    return Failure(name, run.key, row.status, STATUSES[row.status][0], row.reason or STATUSES[row.status][1])
