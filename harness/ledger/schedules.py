"""The order in which each rank of a pipeline works: what PyTorch's schedules carry out, without torch.

An action is F (forward), B (whole backward), or the two halves of B: I (gradient of the stage's input) and W (of its
weights). `orders` gives every rank's actions for p ranks with v stages each and m microbatches. They are the orders of
torch.distributed.pipelining 2.13 (its compute-only tables; a test holds them against it), which differ from the papers'
here and there:

- 1f1b: rank r runs p - r forwards before its first backward, as in Narayanan et al. 2021.
- interleaved: Narayanan et al. 2021, but m need not be a multiple of p: rounds of m / max(1, m // p) microbatches.
- zero-bubble: ZB1P's idea (Qi et al. 2024) from 1f1b's code: p - 1 - r warm-up forwards, and W first run after r
  backwards. Theirs fills W by a search; this fixed order reaches their idle time at equal times.
- zbv: Qi et al. 2024, section 6, for at least 2 p - 1 microbatches; with fewer the missing ones are left out and
  their places stay, so the order is no longer theirs.
- dualpipev: DeepSeek's DualPipeV. An "overlapped" F and B run one after the other, and what F made is sent on after B.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from harness.spec.parallelism import MANY_STAGES, V_SHAPED, ParallelismSpec, Schedule

Kind = Literal["F", "B", "I", "W"]


class Action(NamedTuple):
    """One piece of work of one rank; `str` gives torch's notation, such as 3F0."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


Order = tuple[Action, ...]


@dataclass(frozen=True)
class Pipeline:
    """A schedule for p ranks, v stages a rank and m microbatches. Raises ValueError where the schedule has none."""

    schedule: Schedule
    num_ranks: int
    """p"""
    num_microbatches: int
    """m"""
    stages_per_rank: int = 1
    """v"""

    def __post_init__(self) -> None:
        problem = schedule_problem(self.schedule, self.num_ranks, self.num_microbatches, self.stages_per_rank)
        if problem:
            raise ValueError(problem)

    @classmethod
    def of(cls, mesh: ParallelismSpec) -> Pipeline:
        """The pipeline of a mesh."""
        return cls(mesh.schedule, mesh.pp, mesh.num_microbatches, mesh.local_stages)

    @property
    def num_stages(self) -> int:
        return self.num_ranks * self.stages_per_rank

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Stages on a rank: r and 2 p - 1 - r in a V, else r, r + p, r + 2 p ..."""
        if self.schedule in V_SHAPED:
            return (rank, 2 * self.num_ranks - 1 - rank)
        return tuple(rank + each * self.num_ranks for each in range(self.stages_per_rank))

    def rank_of(self, stage: int) -> int:
        if self.schedule in V_SHAPED and stage >= self.num_ranks:
            return 2 * self.num_ranks - 1 - stage
        return stage % self.num_ranks

    @property
    def loss_rank(self) -> int:
        """The rank of the last stage: the first one in a V."""
        return self.rank_of(self.num_stages - 1)


def schedule_problem(
    schedule: Schedule, num_ranks: int, num_microbatches: int, stages_per_rank: int
) -> str | None:
    """Why torch has no such schedule, or None where it has one."""
    p, m, v = num_ranks, num_microbatches, stages_per_rank
    if p < 2:
        return f"a pipeline needs at least 2 ranks, got {p}"
    if m < 1:
        return f"a pipeline needs at least 1 microbatch, got {m}"
    if schedule in V_SHAPED and v != 2:
        return f"{schedule} is laid in a V, two stages a rank; got {v}"
    if schedule == "interleaved" and v < 2:
        return f"interleaved needs at least two stages a rank, got {v}"
    if schedule in ("gpipe", "1f1b") and v != 1:
        several = ", ".join(MANY_STAGES)
        return f"{schedule} takes one stage a rank, got {v}; schedules for several are {several}"
    if schedule == "1f1b" and m < p:
        return f"1f1b needs at least as many microbatches as ranks, got {m} for {p}"
    if schedule == "dualpipev" and m < 2 * p:
        return f"dualpipev needs at least as many microbatches as stages, got {m} for {2 * p}"
    if schedule in ("interleaved", "zero-bubble"):
        rounds = max(1, m // p)
        if m % rounds:
            return (
                f"{schedule} runs {m} microbatches on {p} ranks in {rounds} rounds, which must be equal; "
                f"{m - m % rounds} or {m + rounds - m % rounds} microbatches would do"
            )
    return None


def orders(pipeline: Pipeline) -> tuple[Order, ...]:
    """The actions of each rank, in order."""
    return tuple(order(pipeline, rank) for rank in range(pipeline.num_ranks))


def order(pipeline: Pipeline, rank: int) -> Order:
    """The actions of one rank, in order."""
    match pipeline.schedule:
        case "gpipe":
            return tuple(_gpipe(pipeline, rank))
        case "zbv":
            return tuple(_zbv(pipeline, rank))
        case "dualpipev":
            return tuple(_dualpipev(pipeline, rank).actions)
        case _:
            return tuple(_one_forward_one_backward(pipeline, rank))


def overlapped(pipeline: Pipeline, rank: int) -> frozenset[Action]:
    """Forwards that torch runs as one with the backward after them: what they made is sent on once both are done."""
    if pipeline.schedule != "dualpipev":
        return frozenset()
    return frozenset(_dualpipev(pipeline, rank).overlapped)


def splits_backward(schedule: Schedule) -> bool:
    """Whether gradients of inputs and of weights are computed apart."""
    return schedule in ("zero-bubble", *V_SHAPED)


def _gpipe(pipeline: Pipeline, rank: int) -> Iterable[Action]:
    """All forwards, then all backwards (Huang et al. 2019)."""
    for kind in ("F", "B"):
        for microbatch in range(pipeline.num_microbatches):
            yield Action(kind, rank, microbatch)


def _one_forward_one_backward(pipeline: Pipeline, rank: int) -> Iterable[Action]:
    """1f1b, interleaved and zero-bubble: warm-up forwards, then forward and backward in turn, then backwards.

    In rounds of k microbatches a rank takes its first stage's k, then its second's; backwards the same from the last
    stage on. The zero-bubble form halves B and runs W r microbatches behind I.
    """
    p, m, v = pipeline.num_ranks, pipeline.num_microbatches, pipeline.stages_per_rank
    per_round = m // max(1, m // p)
    split = pipeline.schedule == "zero-bubble"
    ahead = 2 if pipeline.schedule == "interleaved" else 1
    warmup = min((v - 1) * per_round + ahead * (p - 1 - rank), m * v)
    forwards, backwards, weights = Counter[int](), Counter[int](), Counter[int]()

    def stage(step: int, *, reverse: bool) -> int:
        local = step // per_round % v
        return (v - 1 - local if reverse else local) * p + rank

    def next_action(kind: Kind, at: int, done: Counter[int]) -> Action:
        done[at] += 1
        return Action(kind, at, done[at] - 1)

    for step in range(warmup):
        yield next_action("F", stage(step, reverse=False), forwards)
    for step in range(m * v):
        if warmup + step < m * v:
            yield next_action("F", stage(warmup + step, reverse=False), forwards)
        yield next_action("I" if split else "B", stage(step, reverse=True), backwards)
        if split and step >= rank:
            yield next_action("W", stage(step - rank, reverse=True), weights)
    if split:
        for step in range(max(0, m * v - rank), m * v):
            yield next_action("W", stage(step, reverse=True), weights)


class _Builder:
    """Actions of a rank with two stages, each kind's microbatches in turn."""

    def __init__(self, first: int, second: int) -> None:
        self.stages = (first, second)
        self.actions: list[Action] = []
        self.done = Counter[tuple[str, int]]()
        self.owed: list[tuple[int, int]] = []
        """W that follow from I already run: (chunk, microbatch)."""
        self.overlapped: list[Action] = []

    def add(self, kind: Kind, chunk: int) -> None:
        key = ("F" if kind == "F" else "I", chunk)
        self.actions.append(Action(kind, self.stages[chunk], self.done[key]))
        if kind == "I":
            self.owed.append((chunk, self.done[key]))
        self.done[key] += 1

    def overlap(self, forward: int, backward: int) -> None:
        self.add("F", forward)
        self.overlapped.append(self.actions[-1])
        self.add("B", backward)

    def weight(self, chunks: tuple[int, ...] = (0, 1)) -> bool:
        """The oldest W that these chunks owe; False where they owe none."""
        owed = next((each for each in self.owed if each[0] in chunks), None)
        if owed is None:
            return False
        self.owed.remove(owed)
        self.actions.append(Action("W", self.stages[owed[0]], owed[1]))
        return True


def _zbv(pipeline: Pipeline, rank: int) -> Iterable[Action]:
    p, m = pipeline.num_ranks, pipeline.num_microbatches
    # Fewer than 2 p - 1 microbatches do not fill the V: torch plans for as many and leaves out those that are not.
    planned = max(2 * p - 1, m)
    build = _Builder(rank, 2 * p - 1 - rank)

    def backward(chunk: int) -> None:
        build.add("I", chunk)
        build.weight()

    for _ in range(2 * (p - rank) - 1):
        build.add("F", 0)
    for _ in range(rank):
        build.add("F", 1)
        build.add("F", 0)
    for _ in range(p - rank):
        build.add("F", 1)
        backward(1)
    while build.done["F", 1] < build.done["F", 0] or build.done["F", 0] < planned:
        if build.done["F", 0] < planned:
            build.add("F", 0)
        backward(0)
        build.add("F", 1)
        backward(1)
    for _ in range(rank):
        build.add("I", 0)
        build.add("I", 1)
    for _ in range(p - rank):
        build.add("I", 0)
        build.weight((0,))
    while build.weight((1,)) or build.weight((0,)):
        pass
    return (action for action in build.actions if action.microbatch < m)


def _dualpipev(pipeline: Pipeline, rank: int) -> _Builder:
    p, m = pipeline.num_ranks, pipeline.num_microbatches
    build = _Builder(rank, 2 * p - 1 - rank)
    for _ in range(2 * (p - rank - 1)):
        build.add("F", 0)
    for _ in range(rank + 1):
        build.add("F", 0)
        build.add("F", 1)
    for _ in range(p - rank - 1):
        build.add("I", 1)
        build.weight()
        build.add("F", 1)
    for each in range(m - 2 * p + rank + 1):
        if each == 0 and rank == p - 1:
            build.add("F", 0)
            build.add("B", 1)
        else:
            build.overlap(forward=0, backward=1)
        build.overlap(forward=1, backward=0)
    for _ in range(p - rank - 1):
        build.add("B", 1)
        build.overlap(forward=1, backward=0)
    half: Kind = "B"
    for each in range(rank + 1):
        middle = each == (rank + 1) // 2
        if middle and rank % 2 == 1:
            half = "I"
        build.add(half, 1)
        if middle and rank % 2 == 0:
            half = "I"
        build.add(half, 0)
    for _ in range(p - rank - 1):
        build.weight()
        build.add(half, 0)
    for _ in range(rank + 1):
        build.weight()
    return build
