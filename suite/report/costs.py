"""What the numbers cost: native speed, the cost of emulation (never a speed), each probe's price, and notes.

Tokens per second and MFU are shown for native runs alone, and not for ranks that share one CPU. An emulated run's step
time says what imitating a format costs on this machine; it is shown in a table of its own, under that name.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from suite.report.arms import Arm, Layout
from suite.report.evidence import Evidence, Points
from suite.report.words import NOTHING, number

METRICS = ("step_ms", "tokens_per_s", "mfu", "probe_ms")


@dataclass(frozen=True)
class SpeedRow:
    """One compared arm; texts of medians over recorded steps, then over runs."""

    name: str
    step_ms: str
    tokens_per_s: str
    mfu: str
    versus: str
    """Step time over the baseline's."""


@dataclass(frozen=True)
class ProbeRow:
    """One probe: the period that was asked for, what a recording costs, and how many steps' time that is."""

    name: str
    every: str
    probe_ms: str
    steps: str


@dataclass(frozen=True)
class Note:
    """A chosen or missing value with its reason, and how many runs carry it."""

    name: str
    value: str
    reason: str
    num_runs: int


@dataclass(frozen=True)
class Costs:
    native: tuple[SpeedRow, ...]
    emulated: tuple[SpeedRow, ...]
    probes: tuple[ProbeRow, ...]


def cost_section(layout: Layout, evidence: Evidence) -> Costs:
    """Speed of native arms, cost of emulated ones, cost of probes."""
    points = evidence.points(layout.keys, *METRICS)
    groups: dict[tuple[str, ...], list[Arm]] = {}
    for arm in layout.arms:
        groups.setdefault(arm.treatment, []).append(arm)
    steps = {t: _median(points, "step_ms", _finished(arms, evidence)) for t, arms in groups.items()}
    native: list[SpeedRow] = []
    emulated: list[SpeedRow] = []
    for treatment, arms in groups.items():
        step_ms = steps[treatment]
        if step_ms is None or any(run.spec.shares_cores for arm in arms for run in arm.runs):
            continue
        baseline = next((arm.baseline for arm in arms if arm.baseline), None)
        base_ms = steps.get(baseline.treatment) if baseline else None
        keys = _finished(arms, evidence)
        is_native = all(evidence.rows[key].fidelity == "native" for key in keys)
        row = SpeedRow(
            name=arms[0].name,
            step_ms=number(step_ms),
            tokens_per_s=number(_median(points, "tokens_per_s", keys)) if is_native else "",
            mfu=_mfu(points, keys) if is_native else "",
            versus=f"{number(step_ms / base_ms)}×" if base_ms else NOTHING,
        )
        (native if is_native else emulated).append(row)
    return Costs(tuple(native), tuple(emulated), _probe_rows(layout, evidence, points))


def _finished(arms: Iterable[Arm], evidence: Evidence) -> list[str]:
    return [key for arm in arms for key in arm.keys if evidence.status(key) == "ok"]


def _median(points: Points, metric: str, keys: Iterable[str]) -> float | None:
    medians = [statistics.median(values) for key in keys if (values := points.finite(metric, key, ""))]
    return statistics.median(medians) if medians else None


def _mfu(points: Points, keys: Iterable[str]) -> str:
    value = _median(points, "mfu", keys)
    return NOTHING if value is None else f"{100 * value:.1f}%"


def _probe_rows(layout: Layout, evidence: Evidence, points: Points) -> tuple[ProbeRow, ...]:
    costs: dict[str, list[float]] = {}
    shares: dict[str, list[float]] = {}
    every: dict[str, set[int]] = {}
    for arm in layout.arms:
        for run in arm.runs:
            steps = points.finite("step_ms", run.key, "")
            for scope in points.scopes("probe_ms", run.key):
                values = points.finite("probe_ms", run.key, scope)
                if not values:
                    continue
                cost = statistics.fmean(values)
                costs.setdefault(scope, []).append(cost)
                every.setdefault(scope, set()).add(run.spec.probes.get(scope, 0))
                if steps:
                    shares.setdefault(scope, []).append(cost / statistics.median(steps))
    return tuple(
        ProbeRow(
            name=name,
            every="/".join(str(period) for period in sorted(every[name]) if period) or NOTHING,
            probe_ms=number(statistics.median(costs[name])),
            steps=f"{number(statistics.median(shares[name]), 2)}×" if name in shares else NOTHING,
        )
        for name in sorted(costs)
    )


def note_section(evidence: Evidence, keys: Iterable[str]) -> tuple[Note, ...]:
    """Notes of all runs, the same note said once."""
    seen: dict[tuple[str, str, str], int] = {}
    for key in keys:
        row = evidence.rows.get(key)
        for name, note in sorted((row.notes if row else {}).items()):
            entry = (name, value_text(note.get("value")), str(note.get("reason") or ""))
            seen[entry] = seen.get(entry, 0) + 1
    return tuple(Note(*entry, count) for entry, count in sorted(seen.items()))


def value_text(value: Any) -> str:
    """A stored value as it was written; structures as JSON."""
    if value is None:
        return "not known"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict | list):
        return json.dumps(value, sort_keys=True)
    return str(value)
