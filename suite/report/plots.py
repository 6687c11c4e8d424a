"""Line plots over numbers and dot rows over names: means with their intervals, complete without any script."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from markupsafe import Markup

from suite.report.look import Look
from suite.report.scale import LogScale, Scale, linear, logarithmic
from suite.report.svg import axis_strip, marker_at, percent

HEIGHT = 260
ROW_HEIGHT = 20
LINE_PITCH = 7
"""Pixels between the dots of two lines in one row: side by side they do not hide each other."""

AnyScale = Scale | LogScale


@dataclass(frozen=True)
class Dot:
    """A mean at one place, with its interval where there is one."""

    x: Any
    mean: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Line:
    """Dots of one name, in order of x."""

    name: str
    look: Look
    dots: tuple[Dot, ...]

    @cached_property
    def _by_x(self) -> dict[Any, Dot]:
        return {dot.x: dot for dot in self.dots}

    def at(self, x: Any) -> Dot | None:
        """The dot at `x`, or None."""
        return self._by_x.get(x)


def scale_of(dots: Iterable[Dot], *, logarithmic: bool) -> AnyScale:
    """An axis around the means and, as far as they do not dwarf those, the intervals."""
    dots = list(dots)
    means = [dot.mean for dot in dots]
    ends = [end for dot in dots for end in (dot.low, dot.high) if end is not None]
    if logarithmic:
        return _log(means)
    room = (max(means) - min(means)) or abs(means[0]) or 1.0
    return linear([*means, *(end for end in ends if min(means) - room <= end <= max(means) + room)])


def _log(values: Iterable[float]) -> LogScale:
    return logarithmic(values)


def line_plot(lines: Sequence[Line], y: AnyScale, *, log_x: bool, label: str) -> Markup:
    """Means joined by lines, a marker at each, a bar for each interval; both axes with ticks."""
    xs = [float(dot.x) for line in lines for dot in line.dots]
    x: AnyScale = logarithmic(xs) if log_x else _linear_x(xs)
    parts = [_grid(tick, y) for tick in y.ticks(5)]
    parts += [
        _x_tick(value, x, len(x.ticks(6)) > 4 and index % 2 == 1) for index, value in enumerate(x.ticks(6))
    ]
    paths = [_path(line, x, y) for line in lines]
    parts.append(
        Markup(
            '<svg viewBox="0 0 1000 {0}" width="100%" height="{0}" preserveAspectRatio="none">{1}</svg>'
        ).format(HEIGHT, Markup("").join(paths))
    )
    for line in lines:
        for dot in line.dots:
            across = percent(x.clamp(float(dot.x)))
            parts.append(_bar_down(across, dot, y, line.look))
            parts.append(marker_at(across, _down(dot.mean, y), line.look))
    return Markup('<svg class="plot" height="{}" role="img" aria-label="{}">{}</svg>').format(
        HEIGHT, label, Markup("").join(parts)
    )


def dot_axis(scale: AnyScale) -> Markup:
    """Ticks that all rows of a dot plot share."""
    return axis_strip(scale, 6)


def dot_strip(lines: Sequence[Line], x: Any, scale: AnyScale, label: str) -> Markup:
    """The dots of all lines at one name, on one axis from left to right."""
    height = ROW_HEIGHT + LINE_PITCH * (len(lines) - 1)
    parts = [
        Markup('<line x1="{0}" x2="{0}" y1="0" y2="{1}" class="grid"/>').format(
            percent(scale.at(tick)), height
        )
        for tick in scale.ticks(6)
    ]
    for position, line in enumerate(lines):
        dot, middle = line.at(x), ROW_HEIGHT / 2 + LINE_PITCH * position
        if dot is None:
            continue
        if dot.low is not None and dot.high is not None:
            parts.append(
                Markup('<line x1="{}" x2="{}" y1="{y}" y2="{y}" class="s{c} interval"/>').format(
                    percent(scale.clamp(dot.low)), percent(scale.clamp(dot.high)), y=middle, c=line.look.color
                )
            )
        parts.append(marker_at(percent(scale.clamp(dot.mean)), middle, line.look))
    return Markup('<svg class="strip" height="{}" role="img" aria-label="{}">{}</svg>').format(
        height, label, Markup("").join(parts)
    )


def _linear_x(xs: Sequence[float]) -> Scale:
    low, high = min(xs), max(xs)
    if low == high:
        return Scale(low - 1, high + 1)
    return Scale(low - 0.02 * (high - low), high + 0.02 * (high - low))


def _down(value: float, y: AnyScale) -> float:
    return HEIGHT * (1 - y.clamp(value))


def _grid(tick: float, y: AnyScale) -> Markup:
    top = HEIGHT * (1 - y.at(tick))
    return Markup(
        '<line x1="0" x2="100%" y1="{0:.1f}" y2="{0:.1f}" class="grid"/>'
        '<text x="-6" y="{1:.1f}" text-anchor="end">{2}</text>'
    ).format(top, top + 4, y.text(tick))


def _x_tick(value: float, x: AnyScale, minor: bool) -> Markup:
    at = percent(x.at(value))
    return Markup(
        '<g{5}><line x1="{0}" x2="{0}" y1="{1}" y2="{2}" class="tick"/>'
        '<text x="{0}" y="{3}" text-anchor="middle">{4}</text></g>'
    ).format(
        at, HEIGHT, HEIGHT + 4, HEIGHT + 17, x.text(value), Markup(' class="minor"') if minor else Markup("")
    )


def _path(line: Line, x: AnyScale, y: AnyScale) -> Markup:
    places = [
        f"{1000 * x.clamp(float(dot.x)):.1f} {_down(dot.mean, y):.1f}"
        for dot in line.dots
        if math.isfinite(dot.mean)
    ]
    return Markup('<path d="M{}" class="s{} series" stroke-dasharray="{}"/>').format(
        "L".join(places), line.look.color, line.look.dash
    )


def _bar_down(across: str, dot: Dot, y: AnyScale, look: Look) -> Markup:
    if dot.low is None or dot.high is None:
        return Markup("")
    top, bottom = _down(dot.high, y), _down(dot.low, y)
    if abs(top - bottom) < 9:  # hidden by the marker
        return Markup("")
    return Markup('<line x1="{0}" x2="{0}" y1="{1:.1f}" y2="{2:.1f}" class="s{3} error"/>').format(
        across, top, bottom, look.color
    )
