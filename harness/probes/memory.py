"""Peak memory of a training step by category, measured on one more step after the training, which is undone.

Live tensor bytes come from PyTorch's MemTracker, which follows every storage on any device: categories are
weights (with buffers), gradients, optimizer, activations and temporary, at the moment of the peak, and add
up to the total. Resident set size is no measure of this (an allocator's leftovers add half again), so a CPU
run has these figures alone; on CUDA the allocator's own peak of the same step is beside them (scope
`allocator`), and the difference is noted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from harness.probes.base import Probe

CATEGORIES = {
    "Parameter": "weights",
    "Buffer": "weights",
    "Gradient": "gradients",
    "Optstate": "optimizer",
    "Activation": "activations",
    "Temp": "temporary",
    "Other": "temporary",
    "Total": "total",
}


class Memory(Probe):
    name = "memory"
    in_steps = False

    def finish(self, step: int) -> None:
        run = self.run
        self.num_recordings += 1
        with undone(run.model, run.optimizer):
            peaks, allocator = measure_step(
                run.model, run.optimizer, run.device, lambda: run.train_step(step)
            )
        for scope, num_bytes in peaks.items():
            run.record.measure(step, {"peak_bytes": num_bytes}, scope=scope)
        if allocator is not None:
            run.record.measure(step, {"peak_bytes": allocator}, scope="allocator")
            percent = 100 * (allocator / peaks["total"] - 1)
            run.record.note(
                "allocator_over_total_percent", percent, "peak: CUDA allocator against MemTracker"
            )


def measure_step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    train_step: Callable[[], object],
) -> tuple[dict[str, int], int | None]:
    """Run `train_step` once; return its peak as {category: bytes} and the allocator's, where there is one."""
    from torch.distributed._tools.mem_tracker import MemTracker  # half a second to import

    optimizer.zero_grad(set_to_none=True)
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    tracker = MemTracker()
    tracker.track_external(model, optimizer)
    with tracker:
        train_step()
    allocator = torch.cuda.max_memory_allocated(device) if cuda else None
    peaks = dict.fromkeys(CATEGORIES.values(), 0)
    for place, categories in tracker.get_tracker_snapshot("peak").items():
        if place.type == device.type:
            for kind, num_bytes in categories.items():
                peaks[CATEGORIES[getattr(kind, "value", kind)]] += num_bytes
    return peaks, allocator


@contextmanager
def undone(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Put parameters, buffers, optimizer state and PyTorch's CPU generator back as they were.

    The copies lie in host memory, so that a device's own peak does not see them.
    """
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [
        value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)
    ]
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
