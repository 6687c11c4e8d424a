"""What a claim may measure: one number a run, and how two runs of a pair are set side by side.

A statistic reduces the measurements of one run to a number. A comparison is a statistic's name with `_gap`
(of minus against) or `_ratio` (of over against). A metric's name with `_worst_gap` or `_worst_error` reduces
nothing: it compares both runs point by point and keeps the largest difference (`suite.judge.worst`). Where a metric
is recorded per layer, rank or role, a scope pattern in square brackets picks some of them:
`quant_flushed_fraction_gap[ffn.down.activations]`, `state_bytes_worst_gap[rank*]`. Two patterns with a colon between
them, `peak_bytes_ratio[allocator.allocated:total]`, are that of `of` and that of `against`.
"""

from __future__ import annotations

import difflib
import fnmatch
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from harness.ledger.step import CONTROL
from results.records import METRICS, metric
from suite.judge.catalogue import STATISTICS, Direction, Point, Statistic, largest

Comparison = Literal["", "gap", "ratio", "worst_gap", "worst_error"]
WORST: tuple[Comparison, ...] = ("worst_gap", "worst_error")
"""Comparisons of all points of two runs: the largest |of - against|, and the largest |of - against| / |against|."""


class UnknownMeasureError(ValueError):
    """A measure's name that nothing answers to; the message says which names do."""


@dataclass(frozen=True)
class Measure:
    """A statistic and how `of` is set against `against` ("" where the claim has no `against`)."""

    name: str
    statistic: Statistic
    comparison: Comparison
    scope: str
    against_scope: str = ""
    """Where `against` is read at other scopes than `of`; "": the same."""

    @property
    def unit(self) -> str:
        return "ratio" if self.comparison in ("ratio", "worst_error") else self.statistic.unit

    @property
    def is_worst(self) -> bool:
        """Whether it compares runs point by point and keeps the largest difference."""
        return self.comparison in WORST

    @property
    def direction(self) -> Direction:
        return self.statistic.direction

    @property
    def is_speed(self) -> bool:
        return self.statistic.is_speed

    @property
    def is_exact(self) -> bool:
        """Whether one run decides: a fact, or a bound that each single point must keep."""
        return self.statistic.exact or self.is_worst

    @property
    def has_direction(self) -> bool:
        """Whether being on the claimed side of no difference is worth the words `direction reproduced`."""
        return self.comparison in ("gap", "ratio") or (self.comparison == "" and self.statistic.signed)

    @property
    def of_against(self) -> Measure:
        """The measure as it is read in `against`."""
        return replace(self, scope=self.against_scope) if self.against_scope else self

    def chosen(self, points: Iterable[Point]) -> list[Point]:
        """The points that count: those of its scopes that are numbers. Scopes of different names on the two sides are
        left out of the points, so that they can be compared."""
        found = [p for p in points if scope_matches(p[0], self.scope) and not math.isnan(p[2])]
        return [("", step, value) for _, step, value in found] if self.against_scope else found

    def of_run(self, points: Iterable[Point], num_steps: int) -> float | None:
        """The statistic of one run from all points of its metric, or None where none of them counts."""
        value = self.statistic.reduce(self.chosen(points), num_steps)
        return None if value is None or math.isnan(value) else value


_NAME = re.compile(r"([a-z0-9_]+?)(?:_(gap|ratio|worst_gap|worst_error))?(?:\[([^\[\]]+)\])?")


def find_measure(text: str) -> Measure:
    """The measure called `text`: NAME, NAME_gap or NAME_ratio, or METRIC_worst_gap or METRIC_worst_error, with an
    optional [scope] behind.

    Raises UnknownMeasureError with the nearest match and the allowed names.
    """
    match = _NAME.fullmatch(text.strip())
    name, comparison, scope = match.groups() if match else (text, None, None)
    scope, _, against_scope = (scope or "").partition(":")
    if against_scope and not comparison:
        raise UnknownMeasureError(
            f"{text!r} is of single runs, and [{scope}:{against_scope}] names scopes of two sides"
        )
    if comparison in WORST and name in METRICS:
        points = _point_by_point(name, comparison)
        return Measure(text.strip(), points, comparison, scope or points.scope, against_scope)
    statistic = STATISTICS.get(name)
    if statistic is None:
        near = difflib.get_close_matches(name, STATISTICS, n=1)
        hint = f"; nearest is {near[0]!r}" if near else ""
        raise UnknownMeasureError(
            f"unknown measure {text!r}{hint}; measures are {', '.join(STATISTICS)}, "
            "each alone, or with _gap or _ratio, and [scope] behind where it is recorded per layer; and any metric "
            "with _worst_gap or _worst_error"
        )
    if comparison in WORST:
        raise UnknownMeasureError(
            f"{comparison} compares all points of a metric; write {statistic.metric}_{comparison}"
        )
    if scope and not statistic.scoped:
        raise UnknownMeasureError(f"{name} is recorded for the run as a whole; leave [{scope}] away")
    kind: Comparison = "gap" if comparison == "gap" else "ratio" if comparison == "ratio" else ""
    return Measure(text.strip(), statistic, kind, scope or statistic.scope, against_scope)


def _point_by_point(name: str, comparison: Comparison) -> Statistic:
    """A metric that is not reduced; its scopes are those of the statistic of its name, else all."""
    over = " over |against|" if comparison == "worst_error" else ""
    meaning = f"largest |of - against|{over} at any scope and step: {metric(name).meaning}"
    same = STATISTICS.get(name)
    return Statistic(name, name, largest, meaning, scope=same.scope if same else "*", scoped=True)


RANK = re.compile(r"rank\d+(\.|$)")
"""How the scopes of single ranks begin."""


def scope_matches(scope: str, pattern: str) -> bool:
    """Whether `pattern` names `scope` or its end: `ffn.down.activations` is that role in every layer.

    Scopes of single ranks (`rank1.weights`) answer only to patterns that begin with `rank`, and collectives that reduce
    what is recorded (`control.all_reduce`) only to patterns that name them.
    """
    if RANK.match(scope) and not pattern.startswith("rank"):
        return False
    if CONTROL in scope.split(".") and CONTROL not in pattern:
        return False
    return fnmatch.fnmatchcase(scope, pattern) or (
        pattern != "" and fnmatch.fnmatchcase(scope, f"*.{pattern}")
    )
