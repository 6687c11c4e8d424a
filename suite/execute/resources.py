"""What the machine lets this process use: cores, GPUs, and how often the kernel has killed for memory."""

from __future__ import annotations

import math
import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """Cores this process may run on: the affinity mask, and the control group's quota where there is one."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:
        cores = os.cpu_count() or 1
    quota = _cpu_quota()
    return max(1, min(cores, math.floor(quota)) if quota is not None else cores)


def _cpu_quota() -> float | None:
    for folder in _own_cgroups():
        try:
            quota, period = (folder / "cpu.max").read_text().split()
        except (OSError, ValueError):
            continue
        if quota != "max":
            return int(quota) / int(period)
    return None


def visible_gpus() -> int:
    """NVIDIA devices that a process started now would see, by CUDA_VISIBLE_DEVICES or the kernel's device files."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return len([name for name in chosen.split(",") if name.strip() not in ("", "-1", "NoDevFiles")])
    return len([*Path("/dev").glob("nvidia[0-9]*")])


def num_oom_kills() -> int | None:
    """Processes of this control group killed for memory so far; None where the kernel does not say."""
    for folder in _own_cgroups():
        try:
            text = (folder / "memory.events").read_text()
        except OSError:
            continue
        for line in text.splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    return None


def _own_cgroups() -> list[Path]:
    """Folders of this process's control group (version 2), the innermost first."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        if line.startswith("0::"):
            folder = CGROUP / line[3:].lstrip("/")
            return [folder, *(parent for parent in folder.parents if parent.is_relative_to(CGROUP))]
    return []


def choose_jobs(asked: int | None, device: str, threads: int) -> tuple[int, str]:
    """(slots for runs side by side, reason). A run on CPU takes a slot a rank, on CUDA one (`slots_of`)."""
    if asked is not None:
        return asked, "given by --jobs"
    if device != "cpu":
        return 1, f"runs share one {device} device, and side by side they would disturb each other's speed"
    cores = usable_cores()
    if threads > 1:
        return max(1, cores // threads), f"{cores} usable cores over {threads} threads a run"
    return cores, f"one run a usable core ({cores}), one thread each"


def slots_of(num_ranks: int, device: str, jobs: int) -> int:
    """Slots that a run takes: one a rank on CPU, where each keeps a core busy, but never more than there are.

    So a run of more ranks than slots has the machine to itself, and at least one run always runs.
    """
    return min(num_ranks, jobs) if device == "cpu" else 1
