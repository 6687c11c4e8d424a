"""What a run's process does before it becomes the worker: die with its parent, accept its memory limit.

python -m harness.launch.child RUN_DIR --parent PID [--memory-bytes N] [--worker MODULE]
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies, however the parent dies.

    The parent may have died before the request reached the kernel: then this process ends at once.
    Elsewhere than on Linux a thread looks once a second whether the parent is still the parent.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    else:
        threading.Thread(target=_watch_parent, args=(parent,), daemon=True).start()
    if os.getppid() != parent:
        os._exit(1)


def _watch_parent(parent: int, every_s: float = 1.0) -> None:
    while os.getppid() == parent:
        time.sleep(every_s)
    os.kill(os.getpid(), signal.SIGKILL)


def address_space_bytes() -> int:
    """Bytes of address space this process has mapped (Linux; 0 where /proc is absent)."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * resource.getpagesize()


def limit_memory(memory_bytes: int | None) -> None:
    """Allow this process `memory_bytes` more address space than it has now; allocations beyond that fail.

    Called once torch is imported, so that the limit counts the run's own memory and not the libraries'.
    """
    if memory_bytes is None:
        return
    wanted = address_space_bytes() + memory_bytes
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))


def lift_memory_limit() -> None:
    """Allow this process what it was born with again."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))


def run_worker(run_dir: Path, memory_bytes: int | None, worker: str) -> int:
    """Import the worker's module, apply the memory limit, run it; the exit status of the run."""
    module = importlib.import_module(worker)
    limit_memory(memory_bytes)
    code: int = module.run(run_dir)
    return code


def main() -> int:
    """Entry of a spawned run."""
    parser = argparse.ArgumentParser(description="The process of one run.")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--memory-bytes", type=int)
    parser.add_argument("--worker", required=True)
    arguments = parser.parse_args()
    die_with_parent(arguments.parent)
    return run_worker(arguments.run_dir, arguments.memory_bytes, arguments.worker)


if __name__ == "__main__":
    sys.exit(main())
