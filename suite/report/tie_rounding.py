"""Why tied weights of attention round one way: the drawing on the page of `flash_attention_bias`.

Every number in it comes from rounding to BF16 here. Four sums show what happens to one (the first two are Qiu & Yao's
own example, arXiv 2510.04212); below, all sums of two values between -4 and -2 are rounded and their errors counted.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from suite.report.scale import Scale
from suite.report.svg import percent
from suite.report.words import MINUS, given, number, signed

BITS = 8
"""Significant bits of BF16, the leading one among them."""
FIRST, SECOND = -2.40625, -2.296875
"""The paper's running sum and the value that its result implies: -4.70399 less the sum and the remainder."""
REMAINDER = -4.70399 - FIRST - SECOND
"""What all small weights add to O, about -8.7e-4."""
BELOW_ONE = math.exp(-0.5)
"""A weight as the repair makes it: the largest score no longer gives 1."""
BINS = 21
"""Bars from -1/2 to +1/2 ulp."""


def bf16(x: float) -> float:
    """`x` in BF16: to nearest, ties to even; no overflow, no subnormals."""
    mantissa, exponent = math.frexp(x)
    return math.ldexp(round(math.ldexp(mantissa, BITS)), exponent - BITS)


def ulp(x: float) -> float:
    """BF16's spacing at `x`."""
    return math.ldexp(1.0, math.frexp(x)[1] - BITS)


@dataclass(frozen=True)
class Sum:
    """One O, un-normalised: `weight` times two values, and what the small weights add."""

    title: str
    first: float
    second: float
    weight: float
    remainder: float
    remark: str

    @property
    def exact(self) -> float:
        return self.weight * self.first + self.weight * self.second + self.remainder

    @property
    def stored(self) -> float:
        return bf16(self.exact)

    @property
    def error(self) -> float:
        """In ulp of the exact sum."""
        return (self.stored - self.exact) / ulp(self.exact)


def sums() -> tuple[Sum, ...]:
    """The four that are drawn."""
    unit = ulp(SECOND)
    return (
        Sum("Two weights of 1, nothing else", FIRST, SECOND, 1.0, 0.0, "a tie, and the even neighbour wins"),
        Sum(
            "The same, and the small weights",
            FIRST,
            SECOND,
            1.0,
            REMAINDER,
            "past the middle: away from zero",
        ),
        Sum(
            "Second value one unit smaller",
            FIRST,
            SECOND + unit,
            1.0,
            REMAINDER,
            "no bit is discarded but the small weights",
        ),
        Sum("Both weights below 1", FIRST, SECOND, bf16(BELOW_ONE), REMAINDER, "low bits are filled: no tie"),
    )


def errors(weight: float, remainder: float) -> list[float]:
    """Rounding errors in ulp of all sums of two BF16 values from -2 to above -4, which all carry."""
    values = [-2 * (1 + i / 2 ** (BITS - 1)) for i in range(2 ** (BITS - 1))]
    exact = [weight * a + weight * b + remainder for a in values for b in values]
    return [(bf16(x) - x) / ulp(x) for x in exact]


def explanation() -> Markup:
    """The figure."""
    rows = Markup("").join(_row(each) for each in sums())
    weight = bf16(BELOW_ONE)
    panels = Markup("").join(
        _panel(title, errors(w, r))
        for title, w, r in (
            ("Two weights of 1 alone", 1.0, 0.0),
            ("Two weights of 1 and small ones", 1.0, REMAINDER),
            (f"Two weights of {number(weight)} and small ones", weight, REMAINDER),
        )
    )
    return _FIGURE.format(rows=rows, panels=panels, remainder=number(REMAINDER))


_FIGURE = Markup(
    """
<figure class="drawn tabled ties" id="why-ties">
<h3>Why tied maxima round one way</h3>
<p>O before division is a sum of weights times values, kept in BF16: eight significant bits. A weight of exactly 1 adds
its value as it is. Two values of one sign and size carry, so their sum needs a ninth bit. Where that bit is 1 the sum
lies exactly between two BF16 numbers, and whatever the other keys add, however little ({remainder} here), pushes it
over: for values of one sign always away from zero. Where the bit is 0 hardly any error is made, so nothing makes up for
it.</p>
<div class="tie-rows">{rows}</div>
<p class="soft">Bars mark BF16 numbers, dashes the middles between them, a ring the exact sum, the arrow where
it is stored. Zero lies to the right. Digits behind the bar do not fit.</p>
<h4>All sums of two values between {minus}4 and {minus}2</h4>
<div class="charts n3">{panels}</div>
<figcaption>Share of sums by the error of storing them, in spacings of BF16; the triangle marks the mean. Computed by
rounding each sum; the runs of this case measure the same on whole rows of attention.</figcaption>
</figure>
""".replace("{minus}", MINUS)
)


def _row(each: Sum) -> Markup:
    return Markup(
        '<div class="tie-row"><div><h4>{}</h4>{}</div><div class="tie-line">{}'
        '<p><b>{} ulp</b> <span class="soft">{}</span></p></div></div>'
    ).format(each.title, _digits(each), _line(each), signed(each.error, 2), each.remark)


def _digits(each: Sum) -> Markup:
    """The addition in binary, aligned at the point; the bits that BF16 cannot keep stand behind a bar."""
    kept, lost = _split(each.exact)
    tie = lost.startswith("1")
    return Markup(
        '<table class="bits" aria-label="In binary"><tbody>'
        "{}"
        '<tr class="total"><td>{}</td><td>{}<span class="cut">{}<b class="{}">{}</b>{}</span></td></tr>'
        "</tbody></table>"
    ).format(
        Markup("").join(
            Markup("<tr><td>{}</td><td>{}</td></tr>").format(_decimal(term), _aligned(term, each.exact))
            for term in (each.weight * each.first, each.weight * each.second, each.remainder)
            if term
        ),
        _decimal(each.exact),
        kept,
        Markup('<i aria-hidden="true">|</i>'),
        "tie" if tie else "none",
        lost[:1],
        lost[1:],
    )


def _decimal(x: float) -> str:
    """Seven digits, which is all of every BF16 number drawn here."""
    return given(float(f"{x:.7g}")) if abs(x) < 0.01 else f"{x:.7g}".replace("-", MINUS)


def _binary(x: float, places: int) -> str:
    """|x| in binary with so many places, cut off, not rounded."""
    scaled = math.floor(math.ldexp(abs(x), places) + 1e-9)
    whole, rest = divmod(scaled, 1 << places)
    return f"{whole:b}.{rest:0{places}b}"


def _places(exact: float) -> int:
    """Binary places that BF16 keeps at `exact`."""
    return BITS - math.frexp(exact)[1]


def _split(exact: float) -> tuple[str, str]:
    """Digits of a sum that are kept, and the next eight."""
    places = _places(exact)
    text = _binary(exact, places + 8)
    return text[:-8], text[-8:]


def _aligned(x: float, exact: float) -> Markup:
    """A term under the same point as its sum, up to the bits that the sum may lose."""
    places = _places(exact)
    text = _binary(x, places + 8).rstrip("0")
    width = _binary(exact, 0).index(".")
    text = text.rjust(len(text) + width - text.index("."), " ")
    kept, rest = text[: width + 1 + places].ljust(width + 1 + places), text[width + 1 + places :]
    return Markup('{}<span class="cut"><i aria-hidden="true">|</i>{}</span>').format(kept, rest)


LINE_HEIGHT = 58


def _line(each: Sum) -> Markup:
    """BF16 numbers around a sum, the middles between them, and the arrow from the sum to what is stored."""
    step = ulp(each.exact)
    below = math.floor(each.exact / step) * step
    scale = Scale(below - 1.5 * step, below + 2.5 * step)
    parts = [Markup('<line x1="0" x2="100%" y1="34" y2="34" class="tick"/>')]
    for index in range(-1, 3):
        value = below + index * step
        at = percent(scale.at(value))
        parts.append(
            Markup(
                '<line x1="{0}" x2="{0}" y1="24" y2="44" class="{2}"/>'
                '<text x="{0}" y="57" text-anchor="middle">{1}</text>'
            ).format(at, _decimal(value), "kept" if value == each.stored else "grid-point")
        )
    for index in range(-1, 2):
        at = percent(scale.at(below + (index + 0.5) * step))
        parts.append(Markup('<line x1="{0}" x2="{0}" y1="27" y2="41" class="middle"/>').format(at))
    start, end = scale.at(each.exact), scale.at(each.stored)
    if abs(end - start) > 0.03:
        parts.append(
            Markup(
                '<line x1="{0}" x2="{1}" y1="12" y2="12" class="way"/>'
                '<line x1="{0}" x2="{0}" y1="12" y2="34" class="way thin"/>'
            ).format(percent(start), percent(end))
        )
        head = "M0 12l7 -4v8z" if end < start else "M0 12l-7 -4v8z"
        parts.append(
            Markup('<svg x="{}" class="at"><path d="{}" class="head"/></svg>').format(percent(end), head)
        )
    parts.append(Markup('<circle cx="{}" cy="34" r="4" class="exact"/>').format(percent(start)))
    spoken = f"{_decimal(each.exact)} is stored as {_decimal(each.stored)}, {signed(each.error, 2)} ulp"
    return Markup('<svg class="plot" height="{}" role="img" aria-label="{}">{}</svg>').format(
        LINE_HEIGHT, spoken, Markup("").join(parts)
    )


PANEL_HEIGHT = 120


def _panel(title: str, found: Sequence[float]) -> Markup:
    """A histogram of errors between -1/2 and +1/2 ulp, with their mean."""
    counts = Counter(min(BINS - 1, math.floor((error + 0.5) * BINS)) for error in found)
    top = max(counts.values()) / len(found)
    scale = Scale(-0.56, 0.56)
    width = (scale.at(1 / BINS) - scale.at(0)) * 0.8
    parts = [
        Markup('<rect x="{}" width="{}" y="{:.1f}" height="{:.1f}" class="bar"/>').format(
            percent(scale.at((index + 0.5) / BINS - 0.5) - width / 2),
            percent(width),
            PANEL_HEIGHT * (1 - count / len(found) / top),
            PANEL_HEIGHT * count / len(found) / top,
        )
        for index, count in sorted(counts.items())
    ]
    for value, text in ((-0.5, f"{MINUS}½"), (0.0, "0"), (0.5, "+½")):
        parts.append(
            Markup('<text x="{}" y="{}" text-anchor="middle">{}</text>').format(
                percent(scale.at(value)), PANEL_HEIGHT + 28, text
            )
        )
    mean = statistics.fmean(found)
    parts.append(
        Markup('<line x1="0" x2="100%" y1="{0}" y2="{0}" class="tick"/>').format(PANEL_HEIGHT)
        + Markup('<svg x="{}" y="{}" class="at"><path d="M0 1l6 11h-12z" class="head"/></svg>').format(
            percent(scale.at(mean)), PANEL_HEIGHT
        )
    )
    shown = signed(round(mean, 3), 2)
    return Markup(
        '<div class="chart"><p class="chart-title">{}</p><p class="unit"><span>up to {} % of the sums</span>'
        '<span>mean {} ulp</span></p><svg class="plot" height="{}" role="img" aria-label="{}">{}</svg></div>'
    ).format(
        title,
        round(100 * top),
        shown,
        PANEL_HEIGHT + 32,
        f"{title}: errors from {signed(min(found), 2)} to {signed(max(found), 2)} ulp, mean {shown}",
        Markup("").join(parts),
    )
