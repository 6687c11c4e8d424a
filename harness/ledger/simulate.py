"""A pipeline's pass, event by event: makespan, idle time and microbatches in flight.

    F(s, i) needs F(s - 1, i)
    B(s, i) and I(s, i) need B or I (s + 1, i), on the last stage F(s, i)
    W(s, i) needs I(s, i)

Each rank takes its actions in the order of its schedule and begins one as soon as what it needs has arrived: at once
from its own stages, `p2p` later from another rank (what DualPipeV's overlapped forward made: after the backward that
torch runs with it). Idle share = 1 - busy / makespan. Stages are equal, a send holds nobody up, and nothing overlaps on
a rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from harness.ledger.schedules import Action, Kind, Pipeline, orders, overlapped


@dataclass(frozen=True)
class Durations:
    """Time of one microbatch in one stage, in any unit; of a transfer between two ranks in the same."""

    forward: float = 1.0
    """t_F"""
    input: float = 1.0
    """t_I: backward pass, gradient of the stage's input (the papers' B where they split it)."""
    weight: float = 1.0
    """t_W: backward pass, gradient of its weights."""
    p2p: float = 0.0

    def of(self, kind: Kind) -> float:
        return {"F": self.forward, "B": self.input + self.weight, "I": self.input, "W": self.weight}[kind]


@dataclass(frozen=True)
class Span:
    """One action on the clock."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """All ranks' actions in one pass, from 0 on."""

    spans: tuple[tuple[Span, ...], ...]
    """By rank, in order."""

    @property
    def makespan(self) -> float:
        """From the first action's start to the last one's end."""
        return max(span.end for rank in self.spans for span in rank) - min(
            span.start for rank in self.spans for span in rank
        )

    def busy(self, rank: int) -> float:
        return sum(span.end - span.start for span in self.spans[rank])

    def window(self, rank: int) -> float:
        """From a rank's own first start to its own last end."""
        return self.spans[rank][-1].end - self.spans[rank][0].start

    def idle_share(self, rank: int | None = None) -> float:
        """1 - busy / makespan, of one rank or over all."""
        ranks = range(len(self.spans)) if rank is None else (rank,)
        return 1 - sum(self.busy(each) for each in ranks) / (self.makespan * len(ranks))

    @property
    def window_idle_share(self) -> float:
        """1 - busy / the longest of the ranks' own windows: the bubble rate of Qi et al. 2024, in which a rank may
        begin the next pass while others end this one."""
        ranks = range(len(self.spans))
        return 1 - max(map(self.busy, ranks)) / max(map(self.window, ranks))

    @property
    def overhead(self) -> float:
        """Idle over busy time, over all ranks: x where the idle share is x / (1 + x)."""
        return self.idle_share() / (1 - self.idle_share())


def simulate(pipeline: Pipeline, durations: Durations | None = None) -> Timeline:
    """One pass of all microbatches. Raises ValueError where the orders wait for each other."""
    clock = _Clock(pipeline, durations or Durations())
    while any(clock.todo):
        if not sum(clock.advance(rank) for rank in range(pipeline.num_ranks)):
            waiting = ", ".join(str(order[0]) for order in clock.todo if order)
            raise ValueError(f"the ranks wait for each other: {waiting}")
    return Timeline(tuple(tuple(rank) for rank in clock.spans))


class _Clock:
    """How far each rank has come."""

    def __init__(self, pipeline: Pipeline, durations: Durations) -> None:
        self.pipeline, self.durations = pipeline, durations
        self.todo = [deque(order) for order in orders(pipeline)]
        self.held_back = [overlapped(pipeline, rank) for rank in range(pipeline.num_ranks)]
        self.spans: list[list[Span]] = [[] for _ in self.todo]
        self.ends: dict[Action, float] = {}
        self.sent: dict[Action, float] = {}
        """When its result leaves for another rank."""

    def advance(self, rank: int) -> int:
        """Carry out a rank's next actions up to one that must wait; returns how many."""
        done = 0
        while self.todo[rank]:
            action = self.todo[rank][0]
            start = self._start(rank, action)
            if start is None:
                break
            end = start + self.durations.of(action.kind)
            before = self.spans[rank][-1].action if self.spans[rank] else None
            self.spans[rank].append(Span(action, start, end))
            self.ends[action] = end
            if action not in self.held_back[rank]:
                self.sent[action] = end
            if before is not None and before in self.held_back[rank]:
                self.sent[before] = end
            self.todo[rank].popleft()
            done += 1
        return done

    def _start(self, rank: int, action: Action) -> float | None:
        """When a rank can begin its next action; None where what it needs is not known yet."""
        free = self.spans[rank][-1].end if self.spans[rank] else 0.0
        needed = _needed(self.pipeline, action)
        if not needed:
            return free
        here = self.pipeline.rank_of(needed[0].stage) == rank
        known = self.ends if here else self.sent
        found = next((known[each] for each in needed if each in known), None)
        return None if found is None else max(free, found + (0.0 if here else self.durations.p2p))


def _needed(pipeline: Pipeline, action: Action) -> tuple[Action, ...]:
    """What must have ended before: one of these; empty where nothing must."""
    kind, stage, microbatch = action
    if kind == "F":
        return (Action("F", stage - 1, microbatch),) if stage else ()
    if kind == "W":
        return (Action("I", stage, microbatch),)
    if stage == pipeline.num_stages - 1:
        return (Action("F", stage, microbatch),)
    return (Action("B", stage + 1, microbatch), Action("I", stage + 1, microbatch))


def in_flight(order: Sequence[Action]) -> int:
    """Most (stage, microbatch) pairs of a rank whose forward has run and whose gradients are not complete: what it
    keeps activations for. With a split backward pass that is until W."""
    held = most = 0
    for action in order:
        held += {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind]
        most = max(most, held)
    return most


def peak_in_flight(pipeline: Pipeline) -> tuple[int, ...]:
    """`in_flight` of each rank, in chunks: microbatches times stages; each holds 1 / (p v) of the layers."""
    return tuple(in_flight(order) for order in orders(pipeline))
