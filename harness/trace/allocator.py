"""What CUDA's caching allocator saw of a step, and where it differs from the sum of the tensors.

allocated - requested   rounding: blocks are multiples of 512 bytes, and a large one is not always split
reserved - allocated    fragmentation: segments taken from the device that no tensor lies in
in use - reserved       the CUDA context, NCCL's buffers, libraries' own memory: outside the allocator
requested - tensors     unknown: the batch, constants, cuBLAS workspaces, what kernels take for themselves
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class Allocator:
    """Peaks of one step on one device, in bytes; zeros on a CPU, which has no such allocator."""

    allocated: int = 0
    requested: int = 0
    active: int = 0
    reserved: int = 0
    in_use: int = 0
    """On the whole device after the step, by everybody."""
    blocks: tuple[tuple[int, str], ...] = ()
    """The largest blocks at the allocator's peak: (bytes, the innermost Python frame of ours that asked for it)."""

    def residue(self, tensors: int) -> dict[str, int]:
        """Name -> bytes between the sum of `tensors` at its peak and what the device gave away."""
        return {
            "rounding": self.allocated - self.requested,
            "fragmentation": self.reserved - self.allocated,
            "library": self.in_use - self.reserved,
            "unknown": self.requested - tensors,
        }


@contextmanager
def watched(device: torch.device) -> Iterator[Allocator]:
    """Fills in the figures when the step within is over."""
    found = Allocator()
    if device.type != "cuda":
        yield found
        return
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=200_000)
    before = torch.cuda.memory_allocated(device)
    try:
        yield found
        torch.cuda.synchronize(device)
        stats = torch.cuda.memory_stats(device)
        found.allocated = stats["allocated_bytes.all.peak"]
        found.requested = stats["requested_bytes.all.peak"]
        found.active = stats["active_bytes.all.peak"]
        found.reserved = stats["reserved_bytes.all.peak"]
        free, total = torch.cuda.mem_get_info(device)
        found.in_use = total - free
        traces = torch.cuda.memory._snapshot(device)["device_traces"]
        found.blocks = largest_blocks(traces[device.index or 0], before)
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def largest_blocks(
    trace: Sequence[dict[str, Any]], before: int = 0, count: int = 10
) -> tuple[tuple[int, str], ...]:
    """The largest blocks made in a trace of allocations and alive at its peak.

    `trace`: entries of torch.cuda.memory._snapshot()'s device_traces (action, addr, size, frames); `before`: bytes that
    were allocated when it began.
    """
    now = most = before
    peak = 0
    sizes: dict[int, int] = {}
    for place, entry in enumerate(trace, 1):
        if entry["action"] == "alloc":
            sizes[entry["addr"]] = entry["size"]
            now += entry["size"]
        elif entry["action"] == "free_completed":
            now -= sizes.pop(entry["addr"], entry["size"])
        if now > most:
            most, peak = now, place
    live: dict[int, dict[str, Any]] = {}
    for entry in trace[:peak]:
        if entry["action"] == "alloc":
            live[entry["addr"]] = entry
        elif entry["action"] == "free_completed":
            live.pop(entry["addr"], None)
    largest = sorted(live.values(), key=lambda entry: -entry["size"])[:count]
    return tuple((entry["size"], _origin(entry.get("frames", ()))) for entry in largest)


def _origin(frames: Sequence[dict[str, Any]]) -> str:
    """The innermost frame in this project, else the innermost of all."""
    ours = [frame for frame in frames if "/harness/" in frame["filename"]]
    for frame in (*ours, *frames):
        return f"{frame['filename'].rpartition('/harness/')[2]}:{frame['line']} {frame['name']}"
    return "unknown"
