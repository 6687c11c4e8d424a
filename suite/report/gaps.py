"""The gap to the baseline: one interval for each arm, then the gap over steps, then the raw curves.

Two loss curves that differ by 0.4 % print as one line, so what is shown first is the difference itself: run
minus baseline run of the same seed, at the same step and thus on the same batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from suite.judge.measures import find_measure
from suite.judge.pairing import value_of_run
from suite.judge.statistics import paired_interval
from suite.report.arms import Arm, Layout
from suite.report.evidence import Evidence, Points
from suite.report.lines import Chart, Series, bulk, line_chart, points_for
from suite.report.look import DIVERGED, Look
from suite.report.scale import Scale, around_zero
from suite.report.series import Curve, band, differences
from suite.report.svg import axis_strip, interval_strip, strip_sentence, swatch
from suite.report.words import effect_text, interval_text, join, slug

GAP_MEASURE = "final_loss_gap"
GAP_WINDOWS = 40
"""The gap over steps is shown as means of at most this many windows: a trend stands out of the noise."""


@dataclass(frozen=True)
class GapRow:
    """One arm of the interval table."""

    name: str
    panel: str
    swatch: Markup
    strip: Markup
    effect: str
    interval: str
    num_seeds: int
    remark: str


@dataclass(frozen=True)
class Gaps:
    """The section's parts; `rows` is empty where no arm has a baseline."""

    meaning: str
    baseline: str
    axis: Markup
    scale_note: str
    rows: tuple[GapRow, ...]
    gap_charts: tuple[Chart, ...]
    loss_charts: tuple[Chart, ...]


def final_losses(layout: Layout, evidence: Evidence, points: Points) -> dict[str, float]:
    """Key -> final training loss as the judge reckons it; infinite where diverged, absent where none is."""
    measure = find_measure(GAP_MEASURE)
    values = {}
    for arm in layout.arms:
        for run in arm.runs:
            status = evidence.status(run.key)
            value = value_of_run(measure, status, points.triples("loss", run.key), run.spec.num_steps)
            if value is not None:
                values[run.key] = value
    return values


def gap_section(layout: Layout, evidence: Evidence, points: Points, losses: Mapping[str, float]) -> Gaps:
    """All about the gap of the training loss; `losses` are those of `final_losses`."""
    compared = [arm for arm in layout.arms if arm.baseline and arm.trains]
    gaps = {arm: _pair_gaps(arm, losses) for arm in compared}
    scale = _gap_scale(list(gaps.values()))
    note = ""
    if scale.linear_until is not None:
        note = f"The axis is linear within ±{scale.linear_until:g} and logarithmic beyond."
    return Gaps(
        meaning=find_measure(GAP_MEASURE).statistic.meaning,
        baseline=_baseline_name(compared),
        axis=axis_strip(scale, 6),
        scale_note=note,
        rows=tuple(_gap_row(arm, gaps[arm], scale, evidence) for arm in compared),
        gap_charts=_gap_charts(layout, evidence, points),
        loss_charts=_loss_charts(layout, evidence, points),
    )


def _pair_gaps(arm: Arm, losses: Mapping[str, float]) -> dict[int, float]:
    """Seed -> final loss of the arm minus that of its baseline."""
    assert arm.baseline is not None
    others = arm.baseline.by_seed
    gaps = {}
    for seed, run in arm.by_seed.items():
        other = others.get(seed)
        if other is not None and run.key in losses and other.key in losses:
            gap = losses[run.key] - losses[other.key]
            if not math.isnan(gap):
                gaps[seed] = gap
    return gaps


def _gap_scale(gaps: Sequence[Mapping[int, float]]) -> Scale:
    ends: list[float] = []
    for by_seed in gaps:
        finite = _finite(by_seed.values())
        if finite:
            interval = paired_interval(finite)
            ends += [*finite, interval.mean, interval.low, interval.high]
    return around_zero(ends)


def _gap_row(arm: Arm, gaps: Mapping[int, float], scale: Scale, evidence: Evidence) -> GapRow:
    finite = _finite(gaps.values())
    effect = low = high = None
    if finite:
        interval = paired_interval(finite)
        effect = interval.mean
        if interval.bounded:
            low, high = interval.low, interval.high
    elif gaps:
        effect = next(iter(gaps.values()))
    label = f"{arm.full_name}: {strip_sentence(effect, low, high, len(finite))}"
    return GapRow(
        name=arm.name,
        panel=arm.panel,
        swatch=swatch(arm.look),
        strip=interval_strip(scale, effect, low, high, seeds=finite, look=arm.look, label=label),
        effect="diverged" if effect is not None and math.isinf(effect) else effect_text(effect, ""),
        interval=interval_text(low, high),
        num_seeds=len(gaps),
        remark=_remark(arm, gaps, evidence),
    )


def _remark(arm: Arm, gaps: Mapping[int, float], evidence: Evidence) -> str:
    """Why seeds are missing from the interval."""
    parts = []
    infinite = sorted(seed for seed, gap in gaps.items() if math.isinf(gap))
    if infinite:
        parts.append(f"seed {join([str(seed) for seed in infinite])} diverged and is not in the interval")
    assert arm.baseline is not None
    for seed, run in arm.by_seed.items():
        if seed in gaps:
            continue
        other = arm.baseline.by_seed.get(seed)
        status = evidence.status(run.key)
        if status != "ok":
            parts.append(f"seed {seed} {status}")
        elif other is None or evidence.status(other.key) != "ok":
            parts.append(f"seed {seed} has no finished baseline")
        else:
            parts.append(f"seed {seed} recorded no loss")
    return "; ".join(parts)


def _arm_series(
    arm: Arm, curve_of: Callable[[int, str], Curve], evidence: Evidence, limit: int, show_band: bool
) -> tuple[list[Series], list[Series]]:
    """The mean of an arm's seeds, and its diverged seeds apart: averaged in, one would be all one sees."""
    together: list[Curve] = []
    apart = []
    for seed, run in arm.by_seed.items():
        curve = curve_of(seed, run.key)
        if not curve:
            continue
        if evidence.status(run.key) == "diverged":
            look = Look(arm.look.color, *DIVERGED)
            apart.append(Series(f"{arm.name}, seed {seed} diverged", look, band([curve], limit)))
        else:
            together.append(curve)
    return ([Series(arm.name, arm.look, band(together, limit), show_band)] if together else []), apart


def _early_ends(arms: Sequence[Arm], evidence: Evidence, points: Points) -> str:
    """Which curves stop before the last step, and why."""
    parts = []
    for arm in arms:
        for seed, run in arm.by_seed.items():
            curve, status = points.curve("loss", run.key), evidence.status(run.key)
            if curve and status != "ok":
                parts.append(f"{arm.name} seed {seed} ({status} after step {curve[-1][0]})")
    return f" Ended early: {join(parts)}." if parts else ""


def _gap_charts(layout: Layout, evidence: Evidence, points: Points) -> tuple[Chart, ...]:
    limit = min(GAP_WINDOWS, points_for(len(layout.arms)))
    panels = []
    shown: list[float] = []
    for panel in layout.panels:
        arms = [arm for arm in layout.in_panel(panel) if arm.baseline and arm.trains]
        series: list[Series] = []
        for arm in arms:
            whole, apart = _arm_series(arm, _gap_curve(arm, points), evidence, limit, True)
            series += whole + apart
            shown += [v for s in whole for v in (*s.band.mean, *s.band.low, *s.band.high) if v is not None]
        if series:
            caption = f"Gap to {_baseline_name(arms)} of the same seed and step."
            panels.append((panel, caption + _early_ends(arms, evidence, points), series))
    scale = around_zero(shown)
    return tuple(
        line_chart(
            f"gap-{slug(panel) if panel else 'all'}",
            panel or "All arms",
            series,
            y_label="loss − baseline, nats",
            caption=caption,
            y=scale,
            reference=0.0,
        )
        for panel, caption, series in panels
    )


def _gap_curve(arm: Arm, points: Points) -> Callable[[int, str], Curve]:
    others = arm.baseline.by_seed if arm.baseline else {}

    def curve_of(seed: int, key: str) -> Curve:
        other = others.get(seed)
        return differences(points.curve("loss", key), points.curve("loss", other.key)) if other else []

    return curve_of


def _loss_charts(layout: Layout, evidence: Evidence, points: Points) -> tuple[Chart, ...]:
    charts = []
    for panel in layout.panels:
        arms = layout.in_panel(panel)
        series: list[Series] = []
        shown: list[float] = []
        for arm in arms:
            whole, apart = _arm_series(
                arm,
                lambda _, key: points.curve("loss", key),
                evidence,
                points_for(len(arms), has_band=False),
                False,
            )
            series += whole + apart
            shown += [v for s in whole for v in s.band.mean if v is not None]
        if series:
            chart = line_chart(
                f"loss-{slug(panel) if panel else 'all'}",
                panel or "All arms",
                series,
                y_label="loss, nats/token",
                caption=f"Training loss, mean of the seeds.{_early_ends(arms, evidence, points)}",
                y=bulk(shown),
            )
            charts.append(chart)
    return tuple(charts)


def _baseline_name(arms: Sequence[Arm]) -> str:
    return join(sorted({arm.baseline.name for arm in arms if arm.baseline}))


def _finite(values: Iterable[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]
