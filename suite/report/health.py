"""Quantisation health and what drives it: who clips and flushes where, SQNR over steps, alignment, outliers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from suite.report.arms import Arm, Layout
from suite.report.evidence import Evidence, Points
from suite.report.lines import Chart, Series, line_chart, points_for
from suite.report.look import Look, looks
from suite.report.series import band
from suite.report.svg import swatch
from suite.report.words import number, slug

METRICS = (
    "quant_flushed_fraction",
    "quant_clipped_fraction",
    "quant_sqnr_db",
    "ffn_output_sqnr_db",
    "alignment_cosine_max",
    "alignment_norm_product_max",
    "activation_peak_over_rms",
)
LEVELS = 7
"""Shades h0..h6 of site.css."""


@dataclass(frozen=True)
class Cell:
    """One coloured cell: shade 0..6 (None: not quantised), its text, and the value with more digits."""

    level: int | None
    text: str
    title: str


@dataclass(frozen=True)
class HeatRow:
    """One arm of a heat map."""

    name: str
    panel: str
    swatch: Markup
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class HeatMap:
    """Arms by (layer, role) for one linear and one metric."""

    id: str
    title: str
    explanation: str
    layers: tuple[tuple[str, int], ...]
    """Column groups: layer and how many columns it spans."""
    columns: tuple[str, ...]
    rows: tuple[HeatRow, ...]
    worst: str


@dataclass(frozen=True)
class Health:
    """The section's parts; all empty where nothing was quantised."""

    main: tuple[HeatMap, ...]
    others: tuple[HeatMap, ...]
    charts: tuple[tuple[str, str, tuple[Chart, ...]], ...]
    """(heading, what it means, one chart a panel)."""


@dataclass(frozen=True)
class _Kind:
    metric: str
    title: str
    explanation: str
    shade: Callable[[float], float]
    """Value -> 0 (harmless) .. 1 (bad)."""
    text: Callable[[float], str]


def _share_shade(value: float) -> float:
    """Logarithmic from one in a hundred thousand to all: a fraction of 1e-3 is already worth seeing."""
    return 0.0 if value <= 1e-5 else min(1.0, 1 + math.log10(value) / 5)


def _share_text(value: float) -> str:
    if value == 0:
        return "0"
    return f"{100 * value:.0f}%" if value >= 0.1 else f"{100 * value:.1f}%" if value >= 0.001 else "<0.1%"


_KINDS = (
    _Kind(
        "quant_flushed_fraction",
        "Flushed to zero",
        "Share of non-zero values that the cast turned into zero; mean over recorded steps and seeds.",
        _share_shade,
        _share_text,
    ),
    _Kind(
        "quant_clipped_fraction",
        "Clipped",
        "Share of values beyond the format's largest; mean over recorded steps and seeds.",
        _share_shade,
        _share_text,
    ),
    _Kind(
        "quant_sqnr_db",
        "SQNR of the cast",
        "Signal over quantisation noise in dB, higher is better; mean over recorded steps and seeds.",
        lambda value: min(1.0, max(0.0, (32 - value) / 32)),
        lambda value: f"{value:.0f}",
    ),
)

_ROLES = ("activations", "weights", "gradients")
_MAIN = "ffn.down"
"""The linear behind the SwiGLU product, where outliers of the feed-forward meet the cast first."""


def health_section(layout: Layout, evidence: Evidence) -> Health:
    """Heat maps of the casts and curves of what drives them."""
    points = evidence.points(layout.keys, *METRICS)
    parts = sorted(
        {part for arm in layout.arms for scope in _cast_scopes(points, arm) if (part := _split(scope)[1])}
    )
    main_part = _MAIN if _MAIN in parts else (parts[0] if parts else "")
    maps = {part: [m for kind in _KINDS if (m := _heat_map(kind, part, layout, points))] for part in parts}
    return Health(
        main=tuple(maps.get(main_part, [])),
        others=tuple(m for part in parts if part != main_part for m in maps[part]),
        charts=tuple(c for c in (_sqnr(layout, points), *_drivers(layout, points)) if c[2]),
    )


def _cast_scopes(points: Points, arm: Arm) -> set[str]:
    return {scope for kind in _KINDS for key in arm.keys for scope in points.scopes(kind.metric, key)}


def _split(scope: str) -> tuple[str, str, str]:
    """`layers.3.ffn.down.weights` -> ("3", "ffn.down", "weights"); outside of layers the first part is ""."""
    path, _, role = scope.rpartition(".")
    pieces = path.split(".")
    if len(pieces) > 2 and pieces[0] == "layers":
        return pieces[1], ".".join(pieces[2:]), role
    return "", path, role


def _heat_map(kind: _Kind, part: str, layout: Layout, points: Points) -> HeatMap | None:
    found: dict[tuple[int, str], None] = {}
    means: dict[tuple[Arm, str, str], list[float]] = {}
    for arm in layout.arms:
        for key in arm.keys:
            for scope, curve in points.scopes(kind.metric, key).items():
                layer, name, role = _split(scope)
                values = [value for _, value in curve if math.isfinite(value)]
                if name == part and values:
                    found[int(layer) if layer.isdigit() else -1, role] = None
                    means.setdefault((arm, layer, role), []).append(math.fsum(values) / len(values))
    if not means:
        return None
    columns = sorted(
        found,
        key=lambda column: (column[0], _ROLES.index(column[1]) if column[1] in _ROLES else 9, column[1]),
    )
    rows, worst = [], (-1.0, "")
    for arm in layout.arms:
        cells = []
        for layer, role in columns:
            values = means.get((arm, "" if layer < 0 else str(layer), role), [])
            value = math.fsum(values) / len(values) if values else None
            cells.append(_cell(kind, value))
            if value is not None and kind.shade(value) > worst[0]:
                worst = (kind.shade(value), f"{arm.full_name}, layer {layer}, {role}: {kind.text(value)}")
        if any(cell.level is not None for cell in cells):
            rows.append(HeatRow(arm.name, arm.panel, swatch(arm.look), tuple(cells)))
    numbers = sorted({layer for layer, _ in columns})
    return HeatMap(
        id=slug(f"{kind.metric}-{part}"),
        title=f"{kind.title}, {part}",
        explanation=kind.explanation,
        layers=tuple(
            (f"layer {n}" if n >= 0 else part, sum(1 for layer, _ in columns if layer == n)) for n in numbers
        ),
        columns=tuple(role for _, role in columns),
        rows=tuple(rows),
        worst=worst[1],
    )


def _cell(kind: _Kind, value: float | None) -> Cell:
    if value is None:
        return Cell(None, "", "")
    level = min(LEVELS - 1, math.floor(kind.shade(value) * LEVELS))
    return Cell(level, kind.text(value), number(value))


def _sqnr(layout: Layout, points: Points) -> tuple[str, str, tuple[Chart, ...]]:
        return ( "SQNR of the feed-forward's output", "The feed-forward as it ran against the same
        feed-forward unquantised, in dB, worst layer; step 0 is before " "training went on.",
        _panels(layout, points, "ffn_output_sqnr_db", "min", "dB", "sqnr"), )


def _drivers(layout: Layout, points: Points) -> list[tuple[str, str, tuple[Chart, ...]]]:
    """Alignment, first in the shared base and then in the arms, and outliers."""
    cosine = ("alignment_cosine_max", "largest |cos(w1, w2)|")
    return [
        (
            "Growth of the w1–w2 alignment in the base run",
            "Largest |cos| between a channel's gate and linear weights, layer by layer, with nothing aged.",
            tuple(_base_layers(layout, points, *cosine, "alignment-base")),
        ),
        (
            "Growth of the w1–w2 alignment in the arms",
            "Largest |cos| of any channel and layer.",
            _panels(layout, points, cosine[0], "max", cosine[1], "alignment"),
        ),
        (
            "Activation outliers",
            "Largest activation over root mean square, over the layer where it is largest.",
            _panels(layout, points, "activation_peak_over_rms", "max", "peak / RMS", "outliers"),
        ),
    ]


def _panels(
    layout: Layout, points: Points, metric: str, reduce: str, unit: str, name: str
) -> tuple[Chart, ...]:
    charts = []
    for panel in layout.panels:
        arms = layout.in_panel(panel)
        series = []
        for arm in arms:
            curves = [curve for key in arm.keys if (curve := points.over_scopes(metric, key, reduce))]
            if curves:
                series.append(Series(arm.name, arm.look, band(curves, points_for(len(arms)))))
        if series:
            charts.append(
                line_chart(
                    f"{name}-{slug(panel) if panel else 'all'}", panel or "All arms", series, y_label=unit
                )
            )
    return tuple(charts)


def _base_layers(layout: Layout, points: Points, metric: str, unit: str, name: str) -> list[Chart]:
    """One chart a base run, one line a layer."""
    charts = []
    for position, run in enumerate(layout.bases):
        scopes = points.scopes(metric, run.key)
        if not scopes:
            continue
        title = "Base run, by layer" if len(layout.bases) == 1 else f"Base run {position + 1}, by layer"
        charts.append(line_chart(f"{name}-{position}", title, scope_series(scopes), y_label=unit))
    return charts


def scope_series(scopes: dict[str, list[tuple[int, float]]]) -> Sequence[Series]:
    """One line a scope, in natural order of layers."""
    ordered = sorted(scopes, key=lambda scope: (len(scope), scope))
    appearance: dict[tuple[str, ...], Look] = looks((scope,) for scope in ordered)
    limit = points_for(len(ordered), has_band=False)
    return [
        Series(scope.replace("layers.", "layer "), appearance[(scope,)], band([scopes[scope]], limit))
        for scope in ordered
    ]
