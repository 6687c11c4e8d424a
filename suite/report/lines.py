"""Line charts over steps: a drawing complete in itself, its numbers as a table, and data for zooming.

`site/static/charts.js` replaces the drawing by a zoomable one where scripts run; both use the same colours
and the same ends of the axes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from suite.report.look import Look
from suite.report.scale import Scale, linear
from suite.report.series import Band
from suite.report.svg import marker_at, percent, swatch
from suite.report.words import number

HEIGHT = 230
SVG_POINTS = 90
"""Points of a drawn line: about one for every three or four pixels."""
MAX_POINTS = 2000
"""Points of a zoomable line at most."""
MAX_NUMBERS = 24_000
"""Numbers embedded for one chart at most; more series get fewer points each."""
TABLE_ROWS = 16


@dataclass(frozen=True)
class Series:
    """A named line with its seed band."""

    label: str
    look: Look
    band: Band
    show_band: bool = True
    """Whether the seed band is drawn: not where arms lie on each other."""

    @property
    def has_band(self) -> bool:
        return self.show_band and self.band.num_seeds > 1


@dataclass(frozen=True)
class Chart:
    """What a template needs to show one chart: markup, sentence, table, and data for the script."""

    id: str
    title: str
    caption: str
    summary: str
    unit: str
    svg: Markup
    legend: tuple[tuple[str, Look, Markup], ...]
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    data: dict[str, Any]


def points_for(num_series: int, has_band: bool = True) -> int:
    """How many points each of `num_series` lines may have in a page."""
    columns = max(1, num_series) * (3 if has_band else 1)
    return max(50, min(MAX_POINTS, MAX_NUMBERS // columns))


def line_chart(
    identity: str,
    title: str,
    series: Sequence[Series],
    *,
    y_label: str,
    caption: str = "",
    y: Scale | None = None,
    reference: float | None = None,
) -> Chart:
    """A chart of `series` over steps. `reference` is drawn as a line across (the baseline of a gap)."""
    values = [
        v for s in series for line in (s.band.mean, s.band.low, s.band.high) for v in line if v is not None
    ]
    y = y or bulk(values)
    steps = [step for s in series for step in (s.band.steps[:1] + s.band.steps[-1:])]
    x = Scale(min(steps, default=0), max(steps, default=1) or 1, unit="count")
    if x.low == x.high:
        x = Scale(x.low - 1, x.high + 1, unit="count")
    summary = _summary(title, series, y_label)
    return Chart(
        id=identity,
        title=title,
        caption=caption,
        summary=summary,
        unit=y_label,
        svg=_draw(series, x, y, reference, summary),
        legend=tuple((s.label, s.look, swatch(s.look)) for s in series),
        header=("step", *(s.label for s in series)),
        rows=_table(series),
        data=_data(series, y, reference),
    )


def bulk(values: Sequence[float]) -> Scale:
    """A linear scale that a few huge values (a diverging run) may leave through the top."""
    if not values:
        return Scale(0.0, 1.0)
    ordered = sorted(values)
    low, upper = ordered[0], ordered[int(0.97 * (len(ordered) - 1))]
    limit = upper + 1.5 * (upper - low)
    return linear([low, ordered[-1] if ordered[-1] <= limit else limit])


def _ok(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _draw(series: Sequence[Series], x: Scale, y: Scale, reference: float | None, summary: str) -> Markup:
    parts = []
    for tick in y.ticks(5):
        top = HEIGHT * (1 - y.at(tick))
        parts.append(
            Markup(
                '<line x1="0" x2="100%" y1="{0:.1f}" y2="{0:.1f}" class="grid"/>'
                '<text x="-6" y="{1:.1f}" text-anchor="end">{2}</text>'
            ).format(top, top + 4, y.text(tick))
        )
    for tick in x.ticks(4):
        at = percent(x.at(tick))
        parts.append(
            Markup(
                '<line x1="{0}" x2="{0}" y1="{1}" y2="{2}" class="tick"/>'
                '<text x="{0}" y="{3}" text-anchor="middle">{4}</text>'
            ).format(at, HEIGHT, HEIGHT + 4, HEIGHT + 17, x.text(tick))
        )
    if reference is not None and 0 <= y.at(reference) <= 1:
        parts.append(
            Markup('<line x1="0" x2="100%" y1="{0:.1f}" y2="{0:.1f}" class="zero"/>').format(
                HEIGHT * (1 - y.at(reference))
            )
        )
    bands = [_band_path(s, x, y) for s in series]
    lines = [_line_path(s, x, y) for s in series]
    parts.append(
        Markup(
            '<svg viewBox="0 0 1000 {0}" width="100%" height="{0}" preserveAspectRatio="none">{1}{2}</svg>'
        ).format(HEIGHT, Markup("").join(bands), Markup("").join(lines))
    )
    parts += [_end_marker(s, x, y) for s in series]
    return Markup('<svg class="plot" height="{}" role="img" aria-label="{}">{}</svg>').format(
        HEIGHT, summary, Markup("").join(parts)
    )


def _sampled(steps: Sequence[int]) -> list[int]:
    """Indices of at most SVG_POINTS points, both ends among them."""
    last = len(steps) - 1
    if last < SVG_POINTS:
        return list(range(last + 1))
    return sorted({round(i * last / (SVG_POINTS - 1)) for i in range(SVG_POINTS)})


def _coordinates(s: Series, line: Sequence[float | None], x: Scale, y: Scale) -> list[tuple[str, bool]]:
    """`x y` with whether a point exists; values beyond the axis stay a little outside, so the line leaves."""
    result = []
    for index in _sampled(s.band.steps):
        value = line[index]
        if not _ok(value):
            result.append(("", False))
            continue
        assert value is not None
        across = 1000 * x.at(s.band.steps[index])
        down = HEIGHT * (1 - min(1.5, max(-0.5, y.at(value))))
        result.append((f"{across:.0f} {down:.1f}", True))
    return result


def _path(points: Sequence[tuple[str, bool]]) -> str:
    pieces, pen_down = [], False
    for text, exists in points:
        if exists:
            pieces.append(("L" if pen_down else "M") + text)
        pen_down = exists
    return "".join(pieces)


def _line_path(s: Series, x: Scale, y: Scale) -> Markup:
    return Markup('<path d="{}" class="s{} series" stroke-dasharray="{}" data-series="{}"/>').format(
        _path(_coordinates(s, s.band.mean, x, y)), s.look.color, s.look.dash, s.label
    )


def _band_path(s: Series, x: Scale, y: Scale) -> Markup:
    if not s.has_band:
        return Markup("")
    high = [text for text, exists in _coordinates(s, s.band.high, x, y) if exists]
    low = [text for text, exists in _coordinates(s, s.band.low, x, y) if exists]
    if len(high) < 2:
        return Markup("")
    return Markup('<path d="M{}L{}z" class="s{} band"/>').format(
        "L".join(high), "L".join(reversed(low)), s.look.color
    )


def _end_marker(s: Series, x: Scale, y: Scale) -> Markup:
    for index in range(len(s.band.steps) - 1, -1, -1):
        value = s.band.mean[index]
        if _ok(value):
            assert value is not None
            return marker_at(percent(x.at(s.band.steps[index])), HEIGHT * (1 - y.clamp(value)), s.look)
    return Markup("")


def _table(series: Sequence[Series]) -> tuple[tuple[str, ...], ...]:
    """About TABLE_ROWS rows, evenly spread over the steps, the last step among them."""
    steps = sorted({step for s in series for step in s.band.steps})
    if len(steps) > TABLE_ROWS:
        steps = [steps[round(i * (len(steps) - 1) / (TABLE_ROWS - 1))] for i in range(TABLE_ROWS)]
    columns = [dict(zip(s.band.steps, s.band.mean, strict=True)) for s in series]
    return tuple((str(step), *(number(column.get(step), 4) for column in columns)) for step in steps)


def _data(series: Sequence[Series], y: Scale, reference: float | None) -> dict[str, Any]:
    steps = sorted({step for s in series for step in s.band.steps})
    lines = []
    for s in series:
        line: dict[str, Any] = {
            "label": s.label,
            "color": s.look.color,
            "dash": s.look.dash,
            "marker": s.look.marker,
        }
        names = ("mean", "low", "high") if s.has_band else ("mean",)
        for name in names:
            column = dict(zip(s.band.steps, getattr(s.band, name), strict=True))
            line[name] = [_short(column.get(step)) for step in steps]
        lines.append(line)
    return {
        "x": steps,
        "series": lines,
        "y": {"low": _short(y.low), "high": _short(y.high), "asinh": y.linear_until, "ticks": y.ticks(5)},
        "reference": reference,
    }


def _short(value: float | None) -> float | None:
    """Five significant digits: more than a screen shows, half the bytes."""
    return float(f"{value:.5g}") if value is not None and math.isfinite(value) else None


def _summary(title: str, series: Sequence[Series], unit: str) -> str:
    ends = [(s.label, s.band.last) for s in series if s.band.last is not None]
    if not ends:
        return f"{title}: nothing recorded."
    low = min(ends, key=lambda end: end[1] or 0.0)
    high = max(ends, key=lambda end: end[1] or 0.0)
    if len(ends) == 1:
        return f"{title}: {unit} over steps; {low[0]} ends at {number(low[1])}."
    return (
        f"{title}: {unit} over steps for {len(ends)} series; at the end lowest is {low[0]} at "
        f"{number(low[1])}, highest {high[0]} at {number(high[1])}."
    )
