"""Heat maps of quantisation health: arms by cast, coloured by how much the cast lost."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from markupsafe import Markup

from suite.report.arms import Arm, Layout
from suite.report.evidence import Points
from suite.report.svg import swatch
from suite.report.words import slug

LEVELS = 7
"""Shades h0..h6 of site.css."""
MAIN = "ffn.down"
"""The linear behind the SwiGLU product, where outliers of the feed-forward meet a cast first."""
_ROLES = ("activations", "weights", "gradients")

Column = tuple[int, str, str]
"""Layer (-1: outside of layers), linear and role of a cast."""


@dataclass(frozen=True)
class Cell:
    """One coloured cell: shade 0..6 (None: not quantised) and its text."""

    level: int | None
    text: str


@dataclass(frozen=True)
class HeatRow:
    """One arm of a heat map."""

    name: str
    panel: str
    swatch: Markup
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class HeatMap:
    """Arms by casts. Columns are roles, grouped by layer or by linear."""

    id: str
    title: str
    explanation: str
    groups: tuple[tuple[str, int], ...]
    """Name of a group of columns, and how many it spans."""
    columns: tuple[str, ...]
    rows: tuple[HeatRow, ...]
    worst: str


@dataclass(frozen=True)
class _Kind:
    metric: str
    title: str
    explanation: str
    shade: Callable[[float], float]
    """Value -> 0 (harmless) .. 1 (bad)."""
    text: Callable[[float], str]


def _share_shade(value: float) -> float:
    """Logarithmic from one in ten thousand to all."""
    return 0.0 if value <= 1e-4 else min(1.0, 1 + math.log10(value) / 4)


def _share_text(value: float) -> str:
    if value == 0:
        return "0"
    return f"{100 * value:.0f}%" if value >= 0.1 else f"{100 * value:.1f}%" if value >= 0.001 else "<0.1%"


_KINDS = (
    _Kind(
        "quant_flushed_fraction",
        "Flushed to zero",
        "Share of non-zero values that the cast turned into zero.",
        _share_shade,
        _share_text,
    ),
    _Kind(
        "quant_clipped_fraction",
        "Clipped",
        "Share of values beyond the format's largest.",
        _share_shade,
        _share_text,
    ),
    _Kind(
        "quant_sqnr_db",
        "SQNR of the cast",
        "Signal over quantisation noise in dB; higher is better.",
        lambda value: min(1.0, max(0.0, (32 - value) / 32)),
        lambda value: f"{value:.0f}",
    ),
)
METRICS = tuple(kind.metric for kind in _KINDS)


def heat_maps(layout: Layout, points: Points) -> tuple[tuple[HeatMap, ...], tuple[HeatMap, ...]]:
    """Maps of the main linear by layer, and of all linears at their worst layer, one for each metric."""
    by_layer, by_linear = [], []
    for kind in _KINDS:
        means = _means(kind, layout, points)
        linears = sorted({linear for _, (_, linear, _) in means})
        if not linears:
            continue
        main = MAIN if MAIN in linears else linears[0]
        own = {(arm, (f"layer {c[0]}", c[0], c[2])): v for (arm, c), v in means.items() if c[1] == main}
        by_layer.append(_heat_map(kind, main, layout, own))
        worst: dict[tuple[Arm, tuple[str, int, str]], float] = {}
        for (arm, (_, linear, role)), value in means.items():
            place = (arm, (linear, linears.index(linear), role))
            worst[place] = max(worst.get(place, value), value, key=kind.shade)
        if len(linears) > 1:
            by_linear.append(_heat_map(kind, "every linear at its worst layer", layout, worst))
    return tuple(by_layer), tuple(by_linear)


def split_scope(scope: str) -> Column:
    """`layers.3.ffn.down.weights` -> (3, "ffn.down", "weights"); outside of layers the number is -1."""
    path, _, role = scope.rpartition(".")
    pieces = path.split(".")
    if len(pieces) > 2 and pieces[0] == "layers" and pieces[1].isdigit():
        return int(pieces[1]), ".".join(pieces[2:]), role
    return -1, path, role


def _means(kind: _Kind, layout: Layout, points: Points) -> dict[tuple[Arm, Column], float]:
    """Mean over recorded steps, then over seeds, of each arm and cast."""
    seeds: dict[tuple[Arm, Column], list[float]] = {}
    for arm in layout.arms:
        for key in arm.keys:
            for scope, curve in points.scopes(kind.metric, key).items():
                values = [value for _, value in curve if math.isfinite(value)]
                if values:
                    seeds.setdefault((arm, split_scope(scope)), []).append(math.fsum(values) / len(values))
    return {place: math.fsum(values) / len(values) for place, values in seeds.items()}


def _heat_map(
    kind: _Kind, what: str, layout: Layout, values: Mapping[tuple[Arm, tuple[str, int, str]], float]
) -> HeatMap:
    """The map of `values` at (arm, (group, order of the group, role))."""
    columns = sorted({column for _, column in values}, key=lambda c: (c[1], _role_order(c[2])))
    rows = []
    for arm in layout.arms:
        cells = tuple(_cell(kind, values.get((arm, column))) for column in columns)
        if any(cell.level is not None for cell in cells):
            rows.append(HeatRow(arm.name, arm.panel, swatch(arm.look), cells))
    (arm, (group, _, role)), value = max(values.items(), key=lambda item: kind.shade(item[1]))
    groups = dict.fromkeys(column[0] for column in columns)
    return HeatMap(
        id=slug(f"{kind.metric}-{what}"),
        title=f"{kind.title}, {what}",
        explanation=kind.explanation,
        groups=tuple((name, sum(column[0] == name for column in columns)) for name in groups),
        columns=tuple(column[2] for column in columns),
        rows=tuple(rows),
        worst=f"{arm.full_name}, {group}, {role}: {kind.text(value)}"
        if any(values.values())
        else "none, all are 0",
    )


def _role_order(role: str) -> tuple[int, str]:
    return (_ROLES.index(role) if role in _ROLES else len(_ROLES), role)


def _cell(kind: _Kind, value: float | None) -> Cell:
    if value is None:
        return Cell(None, "")
    return Cell(min(LEVELS - 1, math.floor(kind.shade(value) * LEVELS)), kind.text(value))
