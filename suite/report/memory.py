"""Peak memory by category: a stacked bar for each arm, measured by live tensor bytes at the peak."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from markupsafe import Markup

from harness.ledger.step import CATEGORIES
from suite.report.arms import Arm, Layout
from suite.report.evidence import Evidence
from suite.report.svg import stacked_bar, swatch
from suite.report.words import NOTHING, byte_text, join

TOTAL, ALLOCATOR = "total", "allocator"


@dataclass(frozen=True)
class MemoryRow:
    """One arm: its bar and its amounts in the order of CATEGORIES."""

    name: str
    swatch: Markup
    bar: Markup
    total: str
    allocator: str
    amounts: tuple[str, ...]


@dataclass(frozen=True)
class Memory:
    """The section; `rows` is empty where no memory was recorded."""

    categories: tuple[str, ...]
    rows: tuple[MemoryRow, ...]
    has_allocator: bool
    note: str


def memory_section(layout: Layout, evidence: Evidence) -> Memory:
    """Largest peak of all seeds and conditions per compared arm that trains: memory depends on neither."""
    points = evidence.points(layout.keys, "peak_bytes")
    peaks: dict[Arm, dict[str, float]] = {}
    first: dict[tuple[str, ...], Arm] = {}
    for arm in layout.arms:
        if not arm.trains:
            continue  # studies of memory have a table of their own (suite.report.reconcile)
        target = first.setdefault(arm.treatment, arm)
        for key in arm.keys:
            for scope in points.scopes("peak_bytes", key):
                values = points.finite("peak_bytes", key, scope)
                if values:
                    amounts = peaks.setdefault(target, {})
                    amounts[scope] = max(amounts.get(scope, 0.0), *values)
    if not peaks:
        return Memory(CATEGORIES, (), False, "")
    top = max(max(a.get(TOTAL, 0.0), sum(a.get(c, 0.0) for c in CATEGORIES)) for a in peaks.values())
    merged = f"Largest over {join(['seeds', *(axis.replace('_', ' ') for axis in layout.condition_axes)])}."
    return Memory(
        CATEGORIES,
        tuple(_row(arm, amounts, top) for arm, amounts in peaks.items()),
        any(ALLOCATOR in amounts for amounts in peaks.values()),
        merged,
    )


def _row(arm: Arm, amounts: Mapping[str, float], top: float) -> MemoryRow:
    shown = [(name, amounts.get(name, 0.0)) for name in CATEGORIES]
    total = amounts.get(TOTAL, 0.0)
    largest = max(shown, key=lambda part: part[1])
    peak = byte_text(total or sum(amount for _, amount in shown))
    label = f"{arm.name}: peak {peak}, most of it {largest[0]} ({byte_text(largest[1])})"
    return MemoryRow(
        name=arm.name,
        swatch=swatch(arm.look),
        bar=stacked_bar([(f"m-{name}", amount) for name, amount in shown], total, top, label),
        total=byte_text(amounts.get(TOTAL)),
        allocator=byte_text(amounts.get(ALLOCATOR)),
        amounts=tuple(byte_text(amounts[name]) if name in amounts else NOTHING for name in CATEGORIES),
    )
