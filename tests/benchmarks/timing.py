"""Timing by process CPU seconds, in alternation: wall time says little on a shared machine."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable

from harness.worker import keep_freed_memory

Work = Callable[[], object]
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


def cpu_seconds(work: Work) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def alternate(one: Work, other: Work, rounds: int) -> tuple[float, float, float]:
    """Median CPU seconds of each, and the median over rounds of other / one; the first round warms up."""
    pairs = [(cpu_seconds(one), cpu_seconds(other)) for _ in range(rounds + 1)][1:]
    ratio = statistics.median(b / a for a, b in pairs)
    return statistics.median(a for a, _ in pairs), statistics.median(b for _, b in pairs), ratio


def ratio_as_run(ours: Work, theirs: Work, rounds: int) -> float:
    """theirs / ours, with the worker's malloc settings for ours and glibc's defaults for theirs.

    Each side runs once untimed after the switch, so that neither pays for what the other left.
    """
    pairs = []
    for _ in range(rounds):
        keep_freed_memory()
        ours()
        mine = cpu_seconds(ours)
        restore_malloc()
        theirs()
        pairs.append((mine, cpu_seconds(theirs)))
    return statistics.median(b / a for a, b in pairs)


def restore_malloc() -> None:
    """glibc's defaults again."""
    libc = ctypes.CDLL("libc.so.6")
    libc.mallopt(M_MMAP_THRESHOLD, 128 * 1024)
    libc.mallopt(M_TRIM_THRESHOLD, 128 * 1024)
