"""The schedules' orders against those that PyTorch carries out."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed import pipelining

from harness.ledger.schedules import (
    Action,
    Kind,
    Order,
    Pipeline,
    order,
    orders,
    overlapped,
    schedule_problem,
)
from harness.parallel.pipeline import TORCH_CLASSES
from harness.spec import ParallelismSpec

KINDS: dict[str, Kind] = {
    "FORWARD": "F",
    "FULL_BACKWARD": "B",
    "BACKWARD_INPUT": "I",
    "BACKWARD_WEIGHT": "W",
}
SHAPES = [
    (schedule, stages)
    for schedule, several in {
        "gpipe": (1, 2),
        "1f1b": (1, 2),
        "interleaved": (1, 2, 3),
        "zero-bubble": (1, 2, 3),
        "zbv": (1, 2, 3),
        "dualpipev": (1, 2, 3),
    }.items()
    for stages in several
]


class FakeStage:
    """What torch's schedules ask of a stage; notes what it is told to do."""

    def __init__(self, index: int, ranks: int, stages: int, rank: int) -> None:
        self.stage_index, self.num_stages = index, stages
        self.group_size, self.group_rank, self.group = ranks, rank, None
        self.is_first, self.is_last, self.submod = index == 0, index == stages - 1, None
        self.stage_index_to_group_rank: dict[int, int] = {}
        self.done: list[Action] = []

    def get_fwd_recv_ops(self, microbatch: int) -> list[Any]:
        return []

    get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = get_fwd_recv_ops

    def forward_one_chunk(self, microbatch: int, *args: Any, **kwargs: Any) -> None:
        self.done.append(Action("F", self.stage_index, microbatch))

    def backward_one_chunk(self, microbatch: int, *args: Any, **kwargs: Any) -> None:
        self.done.append(Action("B", self.stage_index, microbatch))

    def perform_reduce_grad(self, factor: int) -> None:
        pass


def torch_orders(schedule: str, p: int, m: int, v: int) -> tuple[tuple[Order, ...], tuple[set[Action], ...]]:
    """Each rank's actions, and the forwards that run as one with a backward. Raises ValueError where torch does.

    Of the multi-stage schedules torch carries out its table; GPipe and 1F1B are loops (and the table that torch draws
    1F1B from begins at microbatch 1 on the last rank), so they are run.
    """
    kind: Any = getattr(pipelining, TORCH_CLASSES[schedule])
    if schedule in ("gpipe", "1f1b"):
        if v > 1:
            raise ValueError("one stage a rank")
        return tuple(_run(kind, rank, p, m) for rank in range(p)), (set(),) * p
    if v == 1 and schedule == "interleaved":
        raise ValueError("that is 1f1b")
    table = kind([FakeStage(index, p, p * v, 0) for index in range(v)], m).pipeline_order
    found, together = [], []
    for rank in range(p):
        actions, pairs = [], set()
        for action in filter(None, table[rank]):
            parts = [
                Action(KINDS[part.computation_type.name], part.stage_index, part.microbatch_index)
                for part in action.sub_actions or (action,)
            ]
            actions += parts
            pairs |= set(parts[:-1])
        found.append(tuple(actions))
        together.append(pairs)
    return tuple(found), tuple(together)


def _run(kind: Any, rank: int, p: int, m: int) -> Order:
    stage = FakeStage(rank, p, p, rank)
    schedule = kind(stage, m)
    schedule._initialize_stage = lambda *args, **kwargs: None
    schedule._step_microbatches()
    return tuple(stage.done)


@pytest.mark.parametrize(("schedule", "v"), SHAPES)
def test_orders_are_torch_s(schedule: Any, v: int) -> None:
    """For all p and m; what torch refuses is refused here, and nothing else."""
    num_orders = 0
    for p in (2, 3, 4, 8):
        for m in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 16, 20):
            problem = schedule_problem(schedule, p, m, v)
            try:
                wanted, together = torch_orders(schedule, p, m, v)
            except ValueError:
                assert problem, (p, m)
                continue
            assert problem is None, (p, m, problem)
            pipeline = Pipeline(schedule, p, m, v)
            assert orders(pipeline) == wanted, (p, m)
            assert tuple(overlapped(pipeline, rank) for rank in range(p)) == together, (p, m)
            num_orders += 1
    possible = v == {"gpipe": 1, "1f1b": 1, "zbv": 2, "dualpipev": 2}.get(schedule, v)
    assert num_orders >= 20 if possible and (schedule, v) != ("interleaved", 1) else num_orders == 0


def test_stages_lie_where_the_mesh_says() -> None:
    for schedule, v in (("1f1b", 1), ("interleaved", 3), ("zbv", 2)):
        mesh = ParallelismSpec(pp=4, schedule=schedule, stages_per_rank=v, microbatches=8)
        pipeline = Pipeline.of(mesh)
        for rank in range(4):
            assert pipeline.stages_of(rank) == mesh.stages_of(rank)
            assert {pipeline.rank_of(stage) for stage in mesh.stages_of(rank)} == {rank}
    assert Pipeline("zbv", 4, 8, 2).loss_rank == 0
    assert Pipeline("1f1b", 4, 8).loss_rank == 3


def test_notation_is_torch_s() -> None:
    assert [str(action) for action in order(Pipeline("1f1b", 2, 2), 1)] == ["1F0", "1B0", "1F1", "1B1"]


@pytest.mark.parametrize(
    ("schedule", "p", "m", "v", "words"),
    [
        ("1f1b", 1, 4, 1, "at least 2 ranks"),
        ("1f1b", 4, 3, 1, "as many microbatches as ranks, got 3 for 4"),
        ("gpipe", 2, 4, 2, "one stage a rank, got 2"),
        ("interleaved", 4, 4, 1, "at least two stages a rank, got 1"),
        ("interleaved", 4, 9, 2, "in 2 rounds, which must be equal; 8 or 10 microbatches would do"),
        ("zbv", 4, 4, 1, "two stages a rank; got 1"),
        ("dualpipev", 4, 7, 2, "as many microbatches as stages, got 7 for 8"),
    ],
)
def test_impossible_schedules_say_why(schedule: Any, p: int, m: int, v: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Pipeline(schedule, p, m, v)
