"""Axes: where a value lies between two ends, and which values get a tick."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from suite.report.words import byte_text, count_text, number


@dataclass(frozen=True)
class Scale:
    """Maps `low`..`high` to 0..1: linear, or asinh(value / linear_until).

    The asinh form is logarithmic on both sides of zero: it shows an arm that broke and arms that differ in
    the third decimal on one axis.
    """

    low: float
    high: float
    linear_until: float | None = None
    unit: str = ""

    def at(self, value: float) -> float:
        """Position of `value`; outside 0..1 where it lies beyond the ends."""
        low, high = self._warp(self.low), self._warp(self.high)
        return (self._warp(value) - low) / (high - low)

    def clamp(self, value: float) -> float:
        """Position of `value`, held within the axis."""
        return min(1.0, max(0.0, self.at(value)))

    def _warp(self, value: float) -> float:
        return value if self.linear_until is None else math.asinh(value / self.linear_until)

    def ticks(self, count: int = 5) -> list[float]:
        """At most about `count` round values between the ends."""
        if self.linear_until is not None:
            return self._decades(count)
        step = nice_step((self.high - self.low) / max(1, count))
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [float(f"{index * step:.12g}") for index in range(first, last + 1)]

    def _decades(self, count: int) -> list[float]:
        assert self.linear_until is not None
        smallest = math.floor(math.log10(self.linear_until) + 1e-9)
        largest = math.ceil(math.log10(max(abs(self.low), abs(self.high))))
        sizes = [10.0**power for power in range(smallest, largest + 1)]
        values = [-size for size in reversed(sizes)] + [0.0] + sizes
        inside = [value for value in values if self.low <= value <= self.high]
        kept: list[float] = []
        # Zero first, then from the outside in; a tick too near to a kept one is left out.
        for value in sorted(inside, key=lambda v: (v != 0, -abs(v))):
            if all(abs(self.at(value) - self.at(other)) >= 0.5 / count for other in kept):
                kept.append(value)
        return sorted(kept)

    def text(self, value: float) -> str:
        """A tick's words: as few digits as the tick needs."""
        if self.unit == "bytes":
            return byte_text(value)
        if self.unit == "count":
            return count_text(value)
        text = number(float(f"{value:.4g}"), 4)
        return text.rstrip("0").rstrip(".") if "." in text and "e" not in text else text


def nice_step(raw: float) -> float:
    """The smallest of 1, 2, 2.5, 5, 10 times a power of ten that is at least `raw`."""
    if raw <= 0 or not math.isfinite(raw):
        return 1.0
    power = 10.0 ** math.floor(math.log10(raw))
    return next(step * power for step in (1, 2, 2.5, 5, 10) if step * power >= raw * 0.999)


def linear(values: Iterable[float], pad: float = 0.05) -> Scale:
    """A linear scale around the finite `values`, with `pad` times their range as room at each end."""
    finite = [value for value in values if math.isfinite(value)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
    if low == high:
        low, high = low - (abs(low) * 0.1 or 0.5), high + (abs(high) * 0.1 or 0.5)
    room = (high - low) * pad
    floor = 0.0 if low >= 0 and low - room < 0 else low - room
    return Scale(floor, high + room)


def around_zero(values: Iterable[float]) -> Scale:
    """A scale that contains zero; asinh where the largest value is over twenty times the middle one."""
    finite = [value for value in values if math.isfinite(value)]
    sizes = sorted(abs(value) for value in finite if value != 0)
    if len(sizes) < 3 or sizes[-1] <= 20 * sizes[len(sizes) // 2]:
        return linear([*finite, 0.0])
    # Six decades are as many as an axis can show.
    middle = max(sizes[len(sizes) // 2], 1e-6 * sizes[-1])
    linear_until = 10.0 ** math.floor(math.log10(middle))
    low, high = min(finite), max(finite)
    return Scale(min(low * 1.5, -linear_until), max(high * 1.5, linear_until), linear_until)


@dataclass(frozen=True)
class LogScale:
    """Maps positive `low`..`high` to 0..1 by their logarithms; 0, where it occurs, has a place of its own below."""

    low: float
    high: float
    has_zero: bool = False

    ZERO_ROOM = 0.09

    def at(self, value: float) -> float:
        """Position of `value`; values of 0 and less stand at 0."""
        if value <= 0:
            return 0.0
        room = self.ZERO_ROOM if self.has_zero else 0.0
        share = (math.log10(value) - math.log10(self.low)) / (math.log10(self.high) - math.log10(self.low))
        return room + (1 - room) * share

    def clamp(self, value: float) -> float:
        """Position of `value`, held within the axis."""
        return min(1.0, max(0.0, self.at(value)))

    def ticks(self, count: int = 5) -> list[float]:
        """Powers of ten, or 1, 2 and 5 times such where there are few; about `count` of them."""
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        stride = max(1, -(-(last - first) // count))
        digits = (1, 2, 5) if self.high / self.low <= 120 else (1,)  # two decades and the room beside them
        values = [d * 10.0**p for p in range(first, last + 1, stride) for d in digits]
        inside = [v for v in values if self.low * 0.999 <= v <= self.high * 1.001]
        return [0.0, *inside] if self.has_zero else inside

    def text(self, value: float) -> str:
        """A tick's words."""
        if value == 0:
            return "0"
        if 1e-3 <= value < 1e6:
            return count_text(value) if value >= 1e3 else f"{value:g}"
        return number(value, 1)


def logarithmic(values: Iterable[float]) -> LogScale:
    """A logarithmic scale around the finite `values` that are above zero; zeros get a place of their own."""
    finite = [value for value in values if math.isfinite(value)]
    positive = [value for value in finite if value > 0]
    low, high = (min(positive), max(positive)) if positive else (0.1, 1.0)
    if low == high:
        low, high = low / 10**0.5, high * 10**0.5
    room = (high / low) ** 0.04
    return LogScale(low / room, high * room, any(value <= 0 for value in finite))
