"""What every launcher offers, and the environment every worker gets."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

WORKER = "harness.worker"
"""Module of the worker: it has `run(run_dir: Path) -> int`, which returns the exit status."""

EXIT_STATUS = {"ok": 0, "crashed": 1, "oom": 10, "diverged": 11, "skipped": 12, "hung": 13}
"""Outcome of a run -> exit status of its process."""

EXIT_RANK_KILLED = 14
"""Exit status of a run one of whose ranks was killed by somebody."""

SIGNALLED_FROM_OUTSIDE = frozenset({1, 2, 9, 15})
"""SIGHUP, SIGINT, SIGKILL, SIGTERM: sent by somebody. SIGSEGV or SIGABRT a process earns itself."""


RANK_VARIABLES = frozenset(
    {
        *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME"),
        *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
        *("MASTER_ADDR", "MASTER_PORT"),
    }
)
"""What makes a process one rank of a group; a run begins without, also where the suite itself was started as a rank."""


class LaunchError(Exception):
    """Worker processes cannot be started on this machine at all."""


@dataclass(frozen=True)
class Request:
    """One run to start: its folder, which holds run.json, and its address-space limit in bytes."""

    run_dir: Path
    memory_bytes: int | None = None


@dataclass(frozen=True)
class Exit:
    """How a run's process ended: its exit status, or minus the signal that killed it, or no status at all."""

    run_dir: Path
    code: int | None
    reason: str = ""
    """Filled where the status is unknown, as when the forking process died with its runs."""


class Launcher(Protocol):
    """Starts runs and reports their ends. Not thread-safe: one thread owns it."""

    mode: str

    def start(self, request: Request) -> None:
        """Start a run; returns at once. Raises LaunchError when this machine cannot start workers."""

    def is_started(self, run_dir: Path) -> bool:
        """True once the run has a process of its own; time limits count from then."""

    def wait(self, timeout_s: float) -> list[Exit]:
        """The runs that ended since the last call; waits up to `timeout_s` for the first."""

    def signal(self, run_dir: Path, number: int) -> None:
        """Send a signal to the run's whole process group; nothing happens when it has ended."""

    def close(self) -> None:
        """Kill what still runs and give the launcher's own process back."""


def worker_environment() -> dict[str, str]:
    """The environment of worker processes.

    Side by side, more threads than cores make spinning OpenMP waits forty times slower, and the runtime reads
    these variables only once, when torch is loaded. A run with several threads sets them itself afterwards.
    glibc reads its tunables at the start of the process alone: huge pages for large blocks spare a training step
    most of its address translation.
    """
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in RANK_VARIABLES and not name.startswith("TORCHELASTIC_")
    }
    environment.update(
        OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE", GOMP_SPINCOUNT="0", PYTHONUNBUFFERED="1"
    )
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if "glibc.malloc.hugetlb" not in tunables:
        environment["GLIBC_TUNABLES"] = ":".join(filter(None, [tunables, "glibc.malloc.hugetlb=1"]))
    root = str(Path(__file__).resolve().parents[2])
    # The worker must import the same harness that was imported here, whatever its working directory.
    environment["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [environment.get("PYTHONPATH")])])
    return environment


def python_command(module: str, *arguments: str) -> list[str]:
    """The command line that runs a module with this interpreter."""
    return [sys.executable, "-m", module, *arguments]
