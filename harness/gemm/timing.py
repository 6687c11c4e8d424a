"""Seconds of one operation, its inputs not in a cache.

On a GPU: CUDA events around each call, behind a write over twice the L2 cache, so that the device is still busy when
the call is queued and the host's launch time is not in it. On a CPU with one thread: the thread's own CPU time, which
other processes do not disturb; with several threads wall time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

WARM_UP_CALLS = 3
ROUND_S = 0.03
"""Seconds that the calls of one round take together, about."""
MAX_CALLS = 50
FLUSH_BYTES = 1 << 26
"""Written between calls on a CPU; on a GPU it is twice the L2 cache if that is more."""


class Timer:
    """Times calls on one device."""

    def __init__(self, device: torch.device, num_threads: int = 1) -> None:
        self.device, self.num_threads = device, num_threads
        size = FLUSH_BYTES
        if device.type == "cuda":
            size = max(size, 2 * torch.cuda.get_device_properties(device).L2_cache_size)
        self._flush = torch.zeros(size, dtype=torch.uint8, device=device)

    @property
    def clock(self) -> str:
        """What the seconds are of."""
        if self.device.type == "cuda":
            return "CUDA events"
        return "CPU time of the process" if self.num_threads == 1 else "wall time"

    def warm_up(self, call: Callable[[], object]) -> int:
        """Run `call` until it is compiled and its memory is there; how many calls fill a round."""
        for _ in range(WARM_UP_CALLS):
            call()
        seconds = self._seconds(call, 2)
        return min(MAX_CALLS, max(1, round(ROUND_S / max(seconds, 1e-9))))

    def round(self, call: Callable[[], object], num_calls: int) -> float:
        """Median seconds of `num_calls` calls."""
        return self._seconds(call, num_calls)

    def _seconds(self, call: Callable[[], object], num_calls: int) -> float:
        if self.device.type != "cuda":
            return statistics.median(self._cpu_seconds(call) for _ in range(num_calls))
        events = []
        for _ in range(num_calls):
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._flush.zero_()
            before.record()
            call()
            after.record()
            events.append((before, after))
        torch.cuda.synchronize(self.device)
        return float(statistics.median(before.elapsed_time(after) / 1000 for before, after in events))

    def _cpu_seconds(self, call: Callable[[], object]) -> float:
        self._flush.add_(1)
        clock = time.process_time if self.num_threads == 1 else time.perf_counter
        started = clock()
        call()
        return clock() - started
