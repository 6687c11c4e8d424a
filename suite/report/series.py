"""Curves made small enough for a page: window means, seed bands, and the union of several curves' steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Curve = Sequence[tuple[int, float]]
"""(step, value) in order of steps."""


@dataclass(frozen=True)
class Band:
    """A line over steps with the lowest and highest seed around it; None where nothing was recorded."""

    steps: tuple[int, ...]
    mean: tuple[float | None, ...]
    low: tuple[float | None, ...]
    high: tuple[float | None, ...]
    num_seeds: int

    @property
    def last(self) -> float | None:
        """The last finite value of the line."""
        return next(
            (value for value in reversed(self.mean) if value is not None and math.isfinite(value)), None
        )


def thin(curve: Curve, limit: int) -> list[tuple[int, float]]:
    """At most `limit` points: means over equal windows of points, placed at each window's last step.

    A non-finite value in a window makes the whole window non-finite: a divergence must not be averaged away.
    """
    if len(curve) <= limit:
        return list(curve)
    result = []
    for index in range(limit):
        window = curve[index * len(curve) // limit : (index + 1) * len(curve) // limit]
        values = [value for _, value in window]
        result.append(
            (window[-1][0], math.fsum(values) / len(values) if all(map(math.isfinite, values)) else math.nan)
        )
    return result


def differences(of: Curve, against: Curve) -> list[tuple[int, float]]:
    """`of` minus `against` at the steps that both have."""
    other = dict(against)
    return [(step, value - other[step]) for step, value in of if step in other]


def band(curves: Sequence[Curve], limit: int) -> Band:
    """Mean, lowest and highest of several seeds' curves at each step, thinned to `limit` points.

    Each seed is thinned before seeds are joined, so the band is that of window means, not of single batches.
    """
    steps = sorted({step for curve in curves for step, _ in curve})
    windows = _windows(steps, limit)
    columns: list[dict[int, float]] = [_window_means(curve, windows) for curve in curves]
    ends = sorted(set(windows.values()))
    mean: list[float | None] = []
    low: list[float | None] = []
    high: list[float | None] = []
    for end in ends:
        values = [column[end] for column in columns if end in column and math.isfinite(column[end])]
        mean.append(math.fsum(values) / len(values) if values else None)
        low.append(min(values) if values else None)
        high.append(max(values) if values else None)
    return Band(tuple(ends), tuple(mean), tuple(low), tuple(high), sum(1 for curve in curves if curve))


def _windows(steps: Sequence[int], limit: int) -> Mapping[int, int]:
    """Step -> the last step of its window."""
    if len(steps) <= limit:
        return {step: step for step in steps}
    windows = {}
    for index in range(limit):
        part = steps[index * len(steps) // limit : (index + 1) * len(steps) // limit]
        windows.update(dict.fromkeys(part, part[-1]))
    return windows


def _window_means(curve: Curve, windows: Mapping[int, int]) -> dict[int, float]:
    sums: dict[int, list[float]] = {}
    for step, value in curve:
        sums.setdefault(windows[step], []).append(value)
    return {end: math.fsum(values) / len(values) for end, values in sums.items()}
