"""A pipeline of stages that sleep: what the schedule itself costs, whatever the machine computes.

PyTorch's real schedules pass small tensors between real ranks. A stage sleeps in its forward pass, and in its backward
pass once when the gradient of its input goes through and once when that of its weights does, so that schedules which
split the backward pass split the sleeps. Sleeps need no cores, so ranks may be more than cores. Each sleep is stamped
with the machine's one monotonic clock, from which all ranks' busy and idle times follow; the ranks are on one machine.

Recorded of the pass that idled least (what else the machine does only adds to it), rank by rank and in all: as
measured, by simulation of the same order (scopes `simulated…`) and by the papers' formula where there is one
(`formula…`). `window` counts each rank from its own first to its own last action, as zero-bubble schedules are counted.
`passN` is the idle share of each pass.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from harness.ledger.bubble import (
    idle_share,
    predicted_in_flight,
    predicted_overhead,
    predicted_window_overhead,
)
from harness.ledger.schedules import Action, Kind, Pipeline
from harness.ledger.simulate import Durations, Span, Timeline, in_flight, simulate
from harness.parallel.pipeline import AnyStage
from harness.parallel.pipeline import Pipeline as Runner
from harness.spec import PipelineSpec, RunSpec
from results.journal import JournalWriter

NUM_PASSES = 3
"""Measured passes, after one that warms up connections and buffers."""
WARM_UP = PipelineSpec(forward_ms=1, input_ms=1, weight_ms=1)
WIDTH = 8
"""Values that pass between stages for one microbatch: next to nothing."""
_KINDS: tuple[Kind, ...] = ("F", "I", "W")


class Stamps:
    """The sleeps of one rank in one pass, in order."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.seconds: dict[Kind, float] = {}

    def begin(self, times: PipelineSpec) -> None:
        self.spans = []
        self.seconds = {"F": times.forward_ms / 1e3, "I": times.input_ms / 1e3, "W": times.weight_ms / 1e3}

    def sleep(self, kind: Kind, stage: int, microbatch: int) -> None:
        started = time.monotonic()
        time.sleep(self.seconds[kind])
        self.spans.append(Span(Action(kind, stage, microbatch), started, time.monotonic()))


class _SleepingBackward(torch.autograd.Function):
    """The identity, which sleeps when a gradient passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stage: SleepingStage, kind: Kind, microbatch: int) -> Tensor:
        ctx.sleep = (kind, stage, microbatch)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        kind, stage, microbatch = ctx.sleep
        stage.stamps.sleep(kind, stage.number, microbatch)
        return gradient, None, None, None


class SleepingStage(AnyStage):
    """A stage of a pipeline that takes its time and adds its weight to what passes."""

    def __init__(self, number: int, num_stages: int, stamps: Stamps) -> None:
        super().__init__()
        self.number, self.num_stages = number, num_stages
        self.stamps = stamps
        self.weight = nn.Parameter(torch.zeros(WIDTH))
        self.anchor = nn.Parameter(torch.zeros(WIDTH)) if self.is_first else None
        """Makes a gradient pass where the first stage's input needs none: torch runs that stage's I together with W."""
        self.microbatch = 0

    def forward(self, x: Tensor) -> Tensor:
        """tokens [1, 1] int64 at the first stage, else [1, 1, WIDTH] -> [1, 1, WIDTH]."""
        microbatch, self.microbatch = self.microbatch, self.microbatch + 1
        self.stamps.sleep("F", self.number, microbatch)
        if self.anchor is not None:
            x = x.unsqueeze(-1) + self.anchor
        passed: Tensor = _SleepingBackward.apply(x, self, "I", microbatch)
        weight: Tensor = _SleepingBackward.apply(self.weight, self, "W", microbatch)
        return passed + weight


def pipeline(spec: RunSpec, request: dict[str, Any], journal: JournalWriter, checkpoints: Path) -> list[Path]:
    """Record the passes of a pipeline over all ranks of this run; rank 0 records. Returns no files."""
    import torch.distributed as dist

    mesh = spec.parallelism
    if mesh.num_ranks != mesh.pp:
        raise ValueError(
            f"a pipeline of sleeping stages has no axis but pp ({mesh.pp}), got {mesh.num_ranks} ranks"
        )
    passes = Passes(spec, dist.get_rank())
    passes.run(WARM_UP)
    timelines = []
    for _ in range(NUM_PASSES):
        timelines.append(passes.run(spec.pipeline))
        journal.beat()
    if dist.get_rank() == 0:
        _record(journal, min(timelines, key=Timeline.idle_share), "")
        for number, timeline in enumerate(timelines, start=1):
            journal.measure(0, {"pipeline_idle_share": timeline.idle_share()}, scope=f"pass{number}")
        _predict(journal, Pipeline.of(mesh), spec.pipeline)
    return []


class Passes:
    """This rank's stages, ready to take part in passes."""

    def __init__(self, spec: RunSpec, rank: int) -> None:
        from harness.parallel import recorder

        mesh = spec.parallelism
        self.stamps = Stamps()
        self.stages = [SleepingStage(number, mesh.num_stages, self.stamps) for number in mesh.stages_of(rank)]
        self._control = recorder.control
        self._batch = torch.zeros(mesh.num_microbatches, 1, dtype=torch.int64)
        self._runner = Runner(
            self.stages,
            mesh,
            None,
            rows=mesh.num_microbatches,
            tokens=1,
            width=WIDTH,
            dtype=torch.float32,
            loss=lambda out, _: out.square().sum(),
            control=recorder.control,
        )

    def run(self, times: PipelineSpec) -> Timeline:
        """One pass of all microbatches; every rank gets all ranks' spans, in milliseconds from the first start on."""
        import torch.distributed as dist

        self.stamps.begin(times)
        for stage in self.stages:
            stage.microbatch = 0
        with self._control():
            dist.barrier()
        self._runner.run(self._batch, self._batch)
        mine = torch.tensor(
            [
                [
                    _KINDS.index(span.action.kind),
                    span.action.stage,
                    span.action.microbatch,
                    span.start,
                    span.end,
                ]
                for span in self.stamps.spans
            ],
            dtype=torch.float64,
        )
        everybody = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        with self._control():
            dist.all_gather(everybody, mine)
        return _timeline(everybody)


def _timeline(ranks: Sequence[Tensor]) -> Timeline:
    first = min(float(rows[:, 3].min()) for rows in ranks)
    return Timeline(
        tuple(
            tuple(
                Span(
                    Action(_KINDS[int(kind)], int(stage), int(microbatch)),
                    1000 * (start - first),
                    1000 * (end - first),
                )
                for kind, stage, microbatch, start, end in rows.tolist()
            )
            for rows in ranks
        )
    )


def _record(journal: JournalWriter, timeline: Timeline, scope: str) -> None:
    """One timeline under `scope` (measured: "")."""
    values = {
        "pipeline_idle_share": timeline.idle_share(),
        "pipeline_overhead": timeline.overhead,
        "pipeline_makespan_ms": timeline.makespan,
    }
    journal.measure(0, values, scope=scope)
    journal.measure(0, {"pipeline_idle_share": timeline.window_idle_share}, scope=_part("window", scope))
    for rank in range(len(timeline.spans)):
        share = timeline.idle_share(rank)
        journal.measure(0, {"pipeline_idle_share": share}, scope=_part(f"rank{rank}", scope))
    held = [in_flight([span.action for span in spans]) for spans in timeline.spans]
    _record_in_flight(journal, held, scope)


def _record_in_flight(journal: JournalWriter, by_rank: Sequence[int], scope: str) -> None:
    for rank, held in enumerate(by_rank):
        journal.measure(0, {"pipeline_in_flight": held}, scope=_part(f"rank{rank}", scope))
    journal.measure(0, {"pipeline_in_flight": max(by_rank)}, scope=scope)


def _part(name: str, scope: str) -> str:
    return f"{scope}-{name}" if scope else name


def _predict(journal: JournalWriter, plan: Pipeline, times: PipelineSpec) -> None:
    """What the same pass takes by simulation, and by formula where one applies."""
    durations = Durations(times.forward_ms, times.input_ms, times.weight_ms)
    _record(journal, simulate(plan, durations), "simulated")
    held = [predicted_in_flight(plan, rank) for rank in range(plan.num_ranks)]
    known = [each for each in held if each is not None]
    if len(known) == plan.num_ranks:
        _record_in_flight(journal, known, "formula")
    overhead, window = predicted_overhead(plan, durations), predicted_window_overhead(plan, durations)
    if overhead is None or window is None:
        return
    ideal = (
        (durations.forward + durations.input + durations.weight)
        * plan.num_microbatches
        * plan.stages_per_rank
    )
    values = {
        "pipeline_idle_share": idle_share(overhead),
        "pipeline_overhead": overhead,
        "pipeline_makespan_ms": ideal * (1 + overhead),
    }
    journal.measure(0, values, scope="formula")
    journal.measure(0, {"pipeline_idle_share": idle_share(window)}, scope="formula-window")
