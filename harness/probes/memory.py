"""Peak memory of a training step by category, measured on a few more steps after the training, which are undone.

Every storage is followed (harness.trace.live), on any device: categories are weights (with buffers), gradients,
optimizer, activations, communication and temporary, at the moment of the peak, and add up to the total. Resident set
size is no measure of this (an allocator's leftovers add half again), so a CPU run has these figures alone; on CUDA the
allocator's own peak of the same step is beside them (scope `allocator`), and the difference is noted. Where a run has
several ranks, all take the step, and rank 0's figures are recorded; the task `step` records every rank's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch

from harness.probes.base import Probe
from harness.trace.follow import TRIES, follow
from harness.trace.known import optimizer_tensors, weights
from harness.trace.live import Live


class Memory(Probe):
    name = "memory"
    in_steps = False

    def finish(self, step: int) -> None:
        run = self.run
        assert run.strategy is not None
        self.num_recordings += 1
        with undone(run.strategy.parts, run.optimizer):
            tries = [
                measure_step(
                    follow(run.strategy, run.optimizer, run.device),
                    run.device,
                    lambda: run.train_step(step),
                )
                for _ in range(TRIES)
            ]
        peaks, allocator = min(tries, key=lambda each: each[0]["total"])
        for scope, num_bytes in peaks.items():
            run.record.measure(step, {"peak_bytes": num_bytes}, scope=scope)
        if allocator is not None:
            run.record.measure(step, {"peak_bytes": allocator}, scope="allocator")
            percent = 100 * (allocator / peaks["total"] - 1)
            run.record.note(
                "allocator_over_total_percent", percent, "peak: CUDA allocator against the sum of the tensors"
            )


def measure_step(
    following: AbstractContextManager[Live], device: torch.device, train_step: Callable[[], object]
) -> tuple[dict[str, int], int | None]:
    """Run `train_step` once; return its peak as {category: bytes} and the allocator's, where there is one."""
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    with following as live:
        train_step()
    allocator = torch.cuda.max_memory_allocated(device) if cuda else None
    held = live.account()
    peak: dict[str, int] = {str(category): num_bytes for category, num_bytes in held.peak.items()}
    return {**peak, "total": held.total}, allocator


@contextmanager
def undone(parts: Sequence[torch.nn.Module], optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Put parameters, buffers, optimizer state and PyTorch's CPU generator back as they were.

    The copies lie in host memory, so that a device's own peak does not see them.
    """
    tensors = [*weights(parts), *optimizer_tensors([optimizer], parts)]
    copies = [tensor.detach().to("cpu", copy=True) for tensor in tensors]
    rates = [group["lr"] for group in optimizer.param_groups]
    generator = torch.get_rng_state()
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, copy in zip(tensors, copies, strict=True):
                tensor.copy_(copy)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        torch.set_rng_state(generator)
