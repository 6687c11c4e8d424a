"""How much of communication nothing hides, from intervals on a clock.

    exposed(collectives, computation) / (end - start)      comm_exposed_share of a step

Intervals are (start, end) in any unit; they may overlap and come in any order.
"""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time without overlaps, in order; empty intervals are left out."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def length(intervals: Iterable[Interval]) -> float:
    """Time that at least one of them covers."""
    return sum(end - start for start, end in union(intervals))


def exposed(communication: Iterable[Interval], computation: Iterable[Interval]) -> float:
    """Time in which collectives run and no computation does."""
    busy = list(computation)
    return length([*communication, *busy]) - length(busy)


def exposed_share(
    communication: Iterable[Interval], computation: Iterable[Interval], span: Interval
) -> float:
    """`exposed` within `span`, over its length. Raises ValueError for an empty span."""
    start, end = span
    if end <= start:
        raise ValueError(f"a share of an empty span {span}")
    return exposed(_within(communication, span), _within(computation, span)) / (end - start)


def _within(intervals: Iterable[Interval], span: Interval) -> list[Interval]:
    return [(max(start, span[0]), min(end, span[1])) for start, end in intervals]
