"""Small inline drawings: marks, interval strips and stacked bars.

No width is fixed: positions across are per cent, so a drawing stretches with its column while its text and
its dots keep their size. Every function returns safe markup; text goes in through `Markup.format`, which
escapes it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from markupsafe import Markup

from suite.report.look import Look
from suite.report.scale import LogScale, Scale
from suite.report.words import signed

STRIP_HEIGHT = 26

_SHAPES = {
    "tick": '<circle cx="8" cy="8" r="7" class="fill"/><path d="M4.4 8.2l2.5 2.6 4.8-5.4" class="cut"/>',
    "half": '<circle cx="8" cy="8" r="6.2" class="line"/>'
    '<path d="M8 1.8a6.2 6.2 0 0 0 0 12.4z" class="fill"/>',
    "cross": '<rect x="1.6" y="1.6" width="12.8" height="12.8" rx="2" class="fill"/>'
    '<path d="M5 5l6 6M11 5l-6 6" class="cut"/>',
    "ring": '<circle cx="8" cy="8" r="6.2" class="line" stroke-dasharray="3 2"/>',
    "unequal": '<path d="M8 1.2L15 14H1z" class="line"/>'
    '<path d="M5.6 9.2h4.8M5.6 11.6h4.8M10 7.6l-4 5.4" class="thin"/>',
    "dash": '<path d="M3 8h10" class="line"/>',
    "dot": '<circle cx="8" cy="8" r="5" class="fill"/>',
    "up": '<path d="M8 1.6L15 14.2H1z" class="fill"/><path d="M8 5.8v4M8 11.4v1.2" class="cut"/>',
    "pause": '<rect x="2" y="2" width="12" height="12" rx="2" class="fill"/>'
    '<path d="M6 5v6M10 5v6" class="cut"/>',
    "clock": '<circle cx="8" cy="8" r="6.2" class="line"/><path d="M8 4.4V8l2.6 1.8" class="thin"/>',
    "bang": '<path d="M8 .8L15.2 8 8 15.2.8 8z" class="fill"/><path d="M8 4.4v4.2M8 10.6v1" class="cut"/>',
    "native": '<rect x="2.5" y="2.5" width="11" height="11" class="fill"/>',
    "emulated": '<rect x="2.5" y="2.5" width="11" height="11" class="line" stroke-dasharray="3 2"/>'
    '<rect x="6" y="6" width="4" height="4" class="fill"/>',
    "simulated": '<rect x="2.5" y="2.5" width="11" height="11" class="line" stroke-dasharray="1.5 2"/>',
    "predicted": '<path d="M2.5 13.5v-11M2.5 13.5h11" class="thin"/>'
    '<path d="M4 11c3 0 4-2 9-8" class="line"/>',
}

_MARKERS = {
    "circle": "M-3.4 0a3.4 3.4 0 1 0 6.8 0a3.4 3.4 0 1 0 -6.8 0",
    "square": "M-3-3h6v6h-6z",
    "triangle": "M0-4L3.8 3h-7.6z",
    "wedge": "M0 4L3.8-3h-7.6z",
    "diamond": "M0-4.2L4.2 0 0 4.2-4.2 0z",
    "cross": "M-3.6-2.4l1.2-1.2L0-1.2l2.4-2.4 1.2 1.2L1.2 0l2.4 2.4-1.2 1.2L0 1.2l-2.4 2.4-1.2-1.2L-1.2 0z",
    "plus": "M-1.2-4h2.4v2.8h2.8v2.4h-2.8v2.8h-2.4v-2.8h-2.8v-2.4h2.8z",
}


def mark(shape: str) -> Markup:
    """A 16-pixel mark that stands before a word; hidden from readers, who have the word."""
    return Markup(
        '<svg class="mark" viewBox="0 0 16 16" width="16" height="16" aria-hidden="true">{}</svg>'
    ).format(Markup(_SHAPES[shape]))


def swatch(look: Look) -> Markup:
    """A legend's sample of a line with its dash and marker."""
    return Markup(
        '<svg class="swatch s{0}" aria-hidden="true">'
        '<path d="M1 6h32" class="series" stroke-dasharray="{1}"/><path d="{2}" class="dot"/></svg>'
    ).format(look.color, look.dash, Markup(_MARKERS[look.marker]))


def percent(position: float) -> str:
    """0..1 as an SVG percentage with two places."""
    text = f"{100 * position:.2f}".rstrip("0").rstrip(".")
    return f"{'0' if text in ('-0', '') else text}%"


def marker_at(x: str, y: float, look: Look) -> Markup:
    """A marker at a percentage across and a pixel down, in a nested drawing that nothing stretches."""
    return Markup('<svg x="{}" y="{:.1f}" class="at"><path d="{}" class="s{} dot"/></svg>').format(
        x, y, Markup(_MARKERS[look.marker]), look.color
    )


def interval_strip(
    scale: Scale | LogScale,
    effect: float | None,
    low: float | None,
    high: float | None,
    *,
    seeds: Sequence[float] = (),
    rule: tuple[float, float] | None = None,
    look: Look | None = None,
    reference: float = 0.0,
    label: str = "",
) -> Markup:
    """One effect on an axis: shaded where the rule is met, a bar for the interval, a small dot for each seed.

    `reference` is the value of "no difference". An end of the interval beyond the axis gets an arrow head. An
    effect of ±inf (diverged) is an arrow at the edge. Without an effect only the axis and the rule are drawn.
    """
    middle = STRIP_HEIGHT / 2
    parts: list[Markup] = []
    if rule is not None:
        left, right = scale.clamp(rule[0]), scale.clamp(rule[1])
        parts.append(
            Markup('<rect x="{}" width="{}" y="2" height="{}" class="rule"/>').format(
                percent(left), percent(right - left), STRIP_HEIGHT - 4
            )
        )
        for bound in rule:
            if math.isfinite(bound) and 0 <= scale.at(bound) <= 1:
                parts.append(_vertical(scale.at(bound), "bound"))
    if 0 <= scale.at(reference) <= 1:
        parts.append(_vertical(scale.at(reference), "zero"))
    color = f"s{look.color}" if look else "ink"
    if effect is not None and math.isinf(effect):
        parts.append(_arrow(1.0 if effect > 0 else 0.0, effect > 0, color))
    elif effect is not None:
        left = scale.clamp(low if low is not None else effect)
        right = scale.clamp(high if high is not None else effect)
        bounded = low is not None and high is not None and math.isfinite(low) and math.isfinite(high)
        parts.append(
            Markup('<line x1="{}" x2="{}" y1="{y}" y2="{y}" class="{c} interval{open}"/>').format(
                percent(left), percent(right), y=middle, c=color, open="" if bounded else " open"
            )
        )
        if low is not None and scale.at(low) < 0:
            parts.append(_arrow(0.0, False, color))
        if high is not None and scale.at(high) > 1:
            parts.append(_arrow(1.0, True, color))
    for value in seeds:
        if math.isfinite(value):
            parts.append(
                Markup('<circle cx="{}" cy="{}" r="2.4" class="{} seed"/>').format(
                    percent(scale.clamp(value)), middle + 7.5, color
                )
            )
    if effect is not None and math.isfinite(effect):
        at = percent(scale.clamp(effect))
        if look is not None:
            parts.append(marker_at(at, middle, look))
        else:
            parts.append(Markup('<circle cx="{}" cy="{}" r="4.2" class="{} dot"/>').format(at, middle, color))
    return Markup('<svg class="strip" height="{}" role="img" aria-label="{}">{}</svg>').format(
        STRIP_HEIGHT, label, Markup("").join(parts)
    )


def strip_sentence(effect: float | None, low: float | None, high: float | None, num_seeds: int) -> str:
    """What an interval strip shows, for those who do not see it."""
    if effect is None:
        return "no effect measured"
    ends = "" if low is None or high is None else f", interval {signed(low)} to {signed(high)}"
    return f"effect {signed(effect)}{ends}, {num_seeds} pairs"


def axis_strip(scale: Scale | LogScale, count: int = 4) -> Markup:
    """Ticks of the axis that a column of strips shares; narrow screens leave out the `minor` ones."""
    parts = []
    spared = scale.ticks(max(2, count // 2))
    for value in scale.ticks(count):
        position = scale.at(value)
        anchor = "start" if position < 0.06 else "end" if position > 0.94 else "middle"
        parts.append(
            Markup(
                '<g{3}><line x1="{0}" x2="{0}" y1="0" y2="4" class="tick"/>'
                '<text x="{0}" y="16" text-anchor="{1}">{2}</text></g>'
            ).format(
                percent(position),
                anchor,
                scale.text(value),
                Markup("") if value in spared else Markup(' class="minor"'),
            )
        )
    return Markup('<svg class="strip axis" height="20" aria-hidden="true">{}</svg>').format(
        Markup("").join(parts)
    )


def stacked_bar(parts: Sequence[tuple[str, float]], total: float, scale_top: float, label: str) -> Markup:
    """Amounts laid end to end, with a tick at the recorded total; `parts` are (class, amount)."""
    left, pieces = 0.0, []
    for name, amount in parts:
        width = amount / scale_top if scale_top else 0.0
        pieces.append(
            Markup('<rect x="{}" width="{}" y="4" height="16" class="part {}"/>').format(
                percent(left), percent(width), name
            )
        )
        left += width
    if total:
        pieces.append(_vertical(min(1.0, total / scale_top), "total"))
    return Markup('<svg class="strip bar" height="24" role="img" aria-label="{}">{}</svg>').format(
        label, Markup("").join(pieces)
    )


def share_bar(parts: Sequence[tuple[str, int]], label: str) -> Markup:
    """Counts by class as one thin bar."""
    total = sum(count for _, count in parts) or 1
    return stacked_bar([(name, count) for name, count in parts], 0, total, label)


def _vertical(position: float, name: str) -> Markup:
    return Markup('<line x1="{0}" x2="{0}" y1="0" y2="100%" class="{1}"/>').format(percent(position), name)


def _arrow(position: float, rightwards: bool, color: str) -> Markup:
    path = "M0-5L0 5L-8 0z" if not rightwards else "M0-5L0 5L8 0z"
    shift = 8.0 if not rightwards else -8.0
    return Markup(
        '<svg x="{}" y="{}" class="at"><path d="{}" transform="translate({} 0)" class="{} dot"/></svg>'
    ).format(percent(position), STRIP_HEIGHT / 2, path, shift, color)
