"""Runs compared point by point: the largest difference anywhere, where a mean could hide one that is wrong.

A point is what a run recorded of a metric at one scope and step. One that only one of two runs has counts as 0 in the
other: a collective that never happened moved 0 bytes, and a loss curve that ends early is wrong by its whole height.
Ranks that only one of them looked at are left out, for a trace may take one rank of each kind.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from suite.judge.catalogue import Point
from suite.judge.measures import RANK, Comparison
from suite.judge.pairing import Pair, Unit
from suite.judge.reasons import arm_name

if TYPE_CHECKING:
    from suite.declare import PlannedRun

Points = Mapping[tuple[str, int], float]
"""(scope, step) -> value."""


@dataclass(frozen=True)
class Difference:
    """Where two runs differ most."""

    size: float
    """|of - against|, over |against| for `worst_error`; infinite where against is 0 and of is not."""
    of: float
    against: float
    scope: str
    step: int


def by_place(points: Iterable[Point]) -> Points:
    """Points by where they lie; of one that was recorded twice, the last value.

    A run that recorded at one step alone has no curve, and its step's number says nothing: it becomes 0.
    """
    found = {(scope, step): value for scope, step, value in points}
    if len({step for _, step in found}) == 1:
        return {(scope, 0): value for (scope, _), value in found.items()}
    return found


def largest_difference(of: Points, against: Points, comparison: Comparison) -> Difference:
    """The largest difference at any place of either run; infinite where they looked at no rank in common."""
    ranks = _ranks(of) & _ranks(against)
    shared = [place for place in of.keys() | against.keys() if _rank(place[0]) in ranks]
    if not shared:
        return Difference(math.inf, math.nan, math.nan, "no rank that both looked at", 0)
    return max(
        (_difference(of.get(at, 0.0), against.get(at, 0.0), *at, comparison) for at in shared),
        key=lambda found: (found.size, found.scope, found.step),
    )


def _rank(scope: str) -> str:
    match = RANK.match(scope)
    return match[0].rstrip(".") if match else ""


def _ranks(points: Points) -> set[str]:
    return {"", *(_rank(scope) for scope, _ in points)}


def _difference(of: float, against: float, scope: str, step: int, comparison: Comparison) -> Difference:
    size = abs(of - against)
    if comparison == "worst_error" and size:
        size = size / abs(against) if against else math.inf
    return Difference(size, of, against, scope, step)


def worst_pairs(
    units: Sequence[Unit],
    points: Mapping[str, Points],
    compared: Mapping[str, Points],
    comparison: Comparison,
) -> tuple[list[Pair], str]:
    """One pair a seed, that of its largest difference, and in words where the largest of all lies.

    Within a unit each run of `of` is set against each of `against`, whose points are `compared`: where the two sides
    are read at different scopes, a run may be its own partner. Seeds with a run that has no points are left out.
    """
    by_seed: dict[int, list[Unit]] = defaultdict(list)
    for unit in units:
        by_seed[unit.seed].append(unit)
    pairs, worst = [], []
    for seed, members in sorted(by_seed.items()):
        if not all(
            run.key in known
            for unit in members
            for side, known in ((unit.of, points), (unit.against, compared))
            for run in side
        ):
            continue
        found = [
            (largest_difference(points[of.key], compared[against.key], comparison), of)
            for unit in members
            for of in unit.of
            for against in unit.against
        ]
        difference, run = max(found, key=lambda item: item[0].size)
        worst.append((difference, run, sum(len(unit.of) * len(unit.against) for unit in members)))
        of_keys = [each.key for unit in members for each in unit.of]
        against_keys = [each.key for unit in members for each in unit.against]
        pairs.append(Pair(seed, difference.of, difference.against, difference.size, of_keys, against_keys))
    return pairs, _place(worst)


def _place(worst: Sequence[tuple[Difference, PlannedRun, int]]) -> str:
    if not worst:
        return ""
    difference, run, _ = max(worst, key=lambda item: item[0].size)
    count = sum(each for _, _, each in worst)
    pairs = f"{count} pair{'' if count == 1 else 's'} of runs"
    if not difference.size:
        return f"{pairs}, no difference anywhere"
    step = f"step {difference.step}" if difference.step else ""
    where = ", ".join(filter(None, (difference.scope, step))) or "its one point"
    values = f"{difference.of:.10g} against {difference.against:.10g}"
    return f"{pairs}; the largest difference is that of {arm_name(run)} at {where}: {values}"
