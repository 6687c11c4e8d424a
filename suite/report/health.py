"""Quantisation health and what drives it: heat maps of the casts, SQNR over steps, alignment, outliers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from suite.report import heat
from suite.report.arms import Layout
from suite.report.evidence import Evidence, Points
from suite.report.heat import HeatMap
from suite.report.lines import Chart, Series, line_chart, points_for
from suite.report.look import Look, looks
from suite.report.series import band
from suite.report.words import slug

METRICS = (*heat.METRICS, "ffn_output_sqnr_db", "alignment_cosine_max", "activation_peak_over_rms")


@dataclass(frozen=True)
class Health:
    """The section's parts; all empty where nothing was recorded."""

    by_layer: tuple[HeatMap, ...]
    by_linear: tuple[HeatMap, ...]
    charts: tuple[tuple[str, str, tuple[Chart, ...]], ...]
    """(heading, what it means, one chart a panel)."""


def health_section(layout: Layout, evidence: Evidence) -> Health:
    """Heat maps of the casts and curves of what drives them."""
    training = [run.key for run in layout.bases] + [k for arm in layout.arms if arm.trains for k in arm.keys]
    points = evidence.points(training, *METRICS)
    by_layer, by_linear = heat.heat_maps(layout, points)
    charts = (_sqnr(layout, points), *_drivers(layout, points))
    return Health(by_layer, by_linear, tuple(chart for chart in charts if chart[2]))


def _sqnr(layout: Layout, points: Points) -> tuple[str, str, tuple[Chart, ...]]:
    return (
        "SQNR of the feed-forward's output",
        "The feed-forward as it ran against the same feed-forward unquantised, in dB, worst layer; step 0 is "
        "before training went on.",
        _panels(layout, points, "ffn_output_sqnr_db", "min", "dB", "sqnr"),
    )


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
    layout: Layout, points: Points, metric: str, reduce: Literal["max", "min"], unit: str, name: str
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
