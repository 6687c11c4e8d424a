"""The process of one run: `python -m harness.worker OUT/journals/KEY/N`.

Reads run.json there, trains, and writes rank0.journal beside it. It never opens the database. The exit
status says the outcome to the parent (0 ok, 10 oom, 11 diverged, 12 skipped, 1 crashed) and the journal's end record
says it to everybody.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import re
import sys
import traceback
from pathlib import Path

for _name, _value in (("OMP_NUM_THREADS", "1"), ("OMP_WAIT_POLICY", "PASSIVE"), ("GOMP_SPINCOUNT", "0")):
    # Read when torch loads; threads that spin while they wait cost 40-fold on a busy machine.
    os.environ.setdefault(_name, _value)

import torch

from harness.registry import PROBES, TASKS
from harness.run import Diverged, Skipped
from harness.spec import LimitsSpec, RunSpec
from results.environment import describe_environment
from results.journal import JournalWriter

EXIT_STATUS = {"ok": 0, "crashed": 1, "oom": 10, "diverged": 11, "skipped": 12}

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3


def preload() -> None:
    """Import what a run imports on its way (its task, the optimizer's dynamo, the memory tracker): two seconds that
    a zygote spends once."""
    for name in TASKS:
        TASKS.load(name)
    for name in PROBES:
        PROBES.load(name)
    for module in ("torch._dynamo", "torch.distributed._tools.mem_tracker"):
        importlib.import_module(module)


def run(run_dir: Path) -> int:
    """Carry out the run requested in `run_dir`; returns the process's exit status."""
    request = json.loads((run_dir / "run.json").read_text())
    spec = RunSpec.model_validate(request["spec"])
    journal = JournalWriter(run_dir / "rank0.journal")
    try:
        journal.start(describe_environment())
        torch.set_num_threads(spec.threads)
        keep_freed_memory()
        checkpoints = run_dir.parents[2] / "checkpoints"
        obsolete: list[Path] = TASKS.load(spec.task)(spec, request, journal, checkpoints)
    except Diverged as error:
        return _end(journal, "diverged", str(error))
    except Skipped as error:
        return _end(journal, "skipped", str(error))
    except Exception as error:
        traceback.print_exc()
        if _is_out_of_memory(error, spec.limits):
            return _end(journal, "oom", _out_of_memory(error, spec.limits))
        return _end(journal, "crashed", f"{type(error).__name__}: {_first_line(error)}")
    status = _end(journal, "ok", "")
    for path in obsolete:
        path.unlink(missing_ok=True)
    return status


def keep_freed_memory() -> None:
    """Make glibc's malloc reuse large blocks instead of returning them to the kernel after each use.

    A training step allocates the same activations again and again; with the default each is mapped, zeroed and unmapped
    by the kernel every time, a sixth of a small model's step in FP32 and a third with emulated FP8.
    """
    if sys.platform != "linux":
        return
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):  # another C library
        return
    mallopt(_M_MMAP_THRESHOLD, 1 << 30)
    mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)
    mallopt(_M_TOP_PAD, 1 << 26)


def _is_out_of_memory(error: Exception, limits: LimitsSpec) -> bool:
    """Whether memory was what failed; of PyTorch's own RuntimeErrors only the text tells."""
    marks = ["DefaultCPUAllocator", "can't allocate memory", "Cannot allocate memory", "bad_alloc"]
    if limits.memory_bytes is not None:
        # oneDNN, denied a buffer, says no more than this.
        marks.append("could not create a primitive")
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(
        mark in str(error) for mark in marks
    )


def _out_of_memory(error: Exception, limits: LimitsSpec) -> str:
    """The reason: which limit was met, if one was set, and what the allocation says."""
    # "[enforce fail at alloc_cpu.cpp:127] err == 0. " tells nobody anything.
    text = re.sub(r"^\[enforce fail at [^]]*\] err == 0\. ", "", _first_line(error))
    if limits.memory_bytes is None:
        return text
    return f"more than {limits.memory_bytes / 1e6:,.0f} MB (limits.memory_bytes): {text}"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _end(journal: JournalWriter, status: str, reason: str) -> int:
    journal.end(status, reason)
    journal.close()
    return EXIT_STATUS[status]


if __name__ == "__main__":
    sys.exit(run(Path(sys.argv[1]).resolve()))
