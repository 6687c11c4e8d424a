"""What a step held, worked out afterwards from the lives of its storages.

Whether a tensor made in the forward pass was kept for the backward one is known only when that has begun. So the mode
in `live.py` notes when each storage was born and died, and this module says, with the whole step known, which category
each belongs to, when the sum was largest, and what lay there then.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from harness.ledger.step import CATEGORIES, STATES, Category

Phase = Literal["forward", "backward", "update"]
NEVER = 1 << 62


@dataclass(slots=True, eq=False)
class Life:
    """One storage, from the event that gave it its bytes to the one that took them."""

    num_bytes: int
    born: int
    """Number of the event; 0: it was there before the step."""
    phase: Phase
    module: str
    """The block whose forward was running."""
    died: int = NEVER
    known: Category | None = None
    """What it is by identity: a parameter, an optimizer's state, a .grad, an FSDP gathered weight."""
    communicated: bool = False
    """A collective read or wrote it."""
    shape: tuple[int, ...] = ()

    def alive(self, event: int) -> bool:
        """After `event`."""
        return self.born <= event < self.died


@dataclass
class Lives:
    """Everything that was alive in a step, and the step's phases."""

    all: list[Life] = field(default_factory=list)
    changes: list[tuple[int, Phase]] = field(default_factory=lambda: [(0, "forward")])
    """(first event, phase) of each stretch of the step."""
    num_events: int = 0
    update: int | None = None
    """The last event before the optimizer went to work; None: it did not."""


@dataclass(frozen=True)
class Account:
    """A step's memory, in the words of harness.ledger.step.RankStep."""

    peak: Mapping[Category, int]
    moment: Phase
    state: Mapping[str, int]
    saved: int
    layers: Mapping[str, int]
    largest: tuple[tuple[Category, Life], ...]
    """What lay there at the peak, the largest first."""

    @property
    def total(self) -> int:
        return sum(self.peak.values())


def account(lives: Lives) -> Account:
    """The peak and what it was made of; what is kept between forward and backward; what lies between steps.

    A storage is, in this order: what it is known to be; an activation, if it was made in a forward pass and lived into
    the backward one; communication, if a collective touched it; else temporary.
    """
    starts = [event for event, _ in lives.changes]
    ends = [event for (_, phase), (event, _) in pairwise(lives.changes) if phase == "forward"]
    category = {id(life): _category(life, starts) for life in lives.all}
    peak = _largest_event(lives.all, lives.num_events)
    held = sorted((life for life in lives.all if life.alive(peak)), key=lambda life: -life.num_bytes)
    kept = [life for life in lives.all if category[id(life)] == "activations"]
    saved, layers = _saved(kept, ends)
    between: dict[str, int] = dict.fromkeys(STATES, 0)
    update = lives.num_events if lives.update is None else lives.update
    for life in lives.all:
        if (name := category[id(life)]) in between and life.alive(update):
            between[name] += life.num_bytes
    return Account(
        peak=_by_category((category[id(life)], life) for life in held),
        moment=lives.changes[bisect_right(starts, peak) - 1][1],
        state=between,
        saved=saved,
        layers=layers,
        largest=tuple((category[id(life)], life) for life in held[:20]),
    )


def _category(life: Life, starts: Sequence[int]) -> Category:
    if life.known is not None:
        return life.known
    if life.phase == "forward":
        following = bisect_right(starts, life.born)
        if following < len(starts) and life.died >= starts[following]:
            return "activations"
    return "communication" if life.communicated else "temporary"


def _largest_event(lives: Iterable[Life], num_events: int) -> int:
    """The first event after which the sum of bytes is largest."""
    change = [0] * (num_events + 1)
    for life in lives:
        change[life.born] += life.num_bytes
        if life.died <= num_events:
            change[life.died] -= life.num_bytes
    best = now = largest = 0
    for event, difference in enumerate(change):
        now += difference
        if now > largest:
            best, largest = event, now
    return best


def _by_category(held: Iterable[tuple[Category, Life]]) -> dict[Category, int]:
    total: dict[Category, int] = dict.fromkeys(CATEGORIES, 0)
    for category, life in held:
        total[category] += life.num_bytes
    return total


def _saved(kept: Sequence[Life], ends: Sequence[int]) -> tuple[int, dict[str, int]]:
    """(bytes kept for the backward pass where that is most, the same by block): at the end of a forward pass, of the
    one with most microbatches in flight where there are several."""
    if not ends:
        return 0, {}
    sums = {end: sum(life.num_bytes for life in kept if life.alive(end - 1)) for end in set(ends)}
    most = max(sums, key=lambda end: (sums[end], -end))
    layers: dict[str, int] = {}
    for life in kept:
        if life.alive(most - 1):
            layers[life.module] = layers.get(life.module, 0) + life.num_bytes
    return sums[most], layers
