"""What a step communicates, by mesh axis and operation (scopes such as `dp.all_reduce`): payload, calls, bytes sent,
time.

Everything that this rank's process groups carried (harness.parallel.recorder), the record's own exchange of losses and
norms under `control`. On a CPU `comm_ms` is from call to end, point to point until it was waited for: with ranks that
share cores it is mostly waiting, and no measure of a scheme. On CUDA calls return before they have run, so time comes
from the profiler: `comm_ms` without a scope, in which any NCCL kernel ran, and `comm_exposed_share`, the part of the
step in which nothing else ran.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch._C._autograd import DeviceType

from harness.ledger.overlap import Interval, exposed_share, length
from harness.parallel import recorder
from harness.probes.base import Probe, StepValues

NCCL = "nccl"
"""How NCCL's kernels are called, in lower case."""


class Collectives(Probe):
    name = "collectives"
    works_inside = True

    def begin(self) -> None:
        self._several = self.run.spec.parallelism.num_ranks > 1
        self._cuda = self.run.device.type == "cuda"
        if not self._several:
            self.run.record.note("comm_bytes", None, "one rank has nobody to communicate with")
        elif not self._cuda:
            reason = "ranks that share a CPU's cores take turns; what overlaps there says nothing"
            self.run.record.note("comm_exposed_share", None, reason)
        self._stack = ExitStack()
        self._calls: list[recorder.Call] = []
        self._profile: Any = None

    def before_step(self, step: int) -> None:
        if not self._several:
            return
        if self._cuda:
            torch.cuda.synchronize()
            kinds = [torch.profiler.ProfilerActivity.CUDA]
            self._profile = self._stack.enter_context(torch.profiler.profile(activities=kinds))
        self._calls = self._stack.enter_context(recorder.recording())

    def after_step(self, step: int, values: StepValues) -> None:
        if not self._several:
            return
        if self._cuda:
            torch.cuda.synchronize()
        self._stack.close()
        for each in recorder.collectives(self._calls, self.run.spec.parallelism):
            self.run.record.measure(
                step,
                {"comm_bytes": each.num_bytes, "comm_count": each.count, "comm_sent_bytes": each.sent_bytes},
                scope=f"{each.axis}.{each.op}",
            )
        if self._cuda:
            self._record_intervals(step)
            return
        for scope, seconds in recorder.seconds(self._calls, self.run.spec.parallelism).items():
            self.run.record.measure(step, {"comm_ms": 1000 * seconds}, scope=scope)

    def _record_intervals(self, step: int) -> None:
        """Time of NCCL's kernels, and of those beside which nothing else ran."""
        communication, computation = intervals(self._profile)
        if not communication:
            return
        both = [*communication, *computation]
        span = min(start for start, _ in both), max(end for _, end in both)
        share = exposed_share(communication, computation, span)
        self.run.record.measure(step, {"comm_ms": 1000 * length(communication), "comm_exposed_share": share})


def intervals(profile: Any) -> tuple[list[Interval], list[Interval]]:
    """(NCCL's kernels, everything else on the device), in seconds."""
    communication: list[Interval] = []
    computation: list[Interval] = []
    for event in profile.profiler.kineto_results.events():
        if event.device_type() == DeviceType.CUDA:
            start = event.start_ns() / 1e9
            kind = communication if NCCL in event.name().lower() else computation
            kind.append((start, start + event.duration_ns() / 1e9))
    return communication, computation
