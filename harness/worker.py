"""The process of one run: `python -m harness.worker OUT/journals/KEY/N`.

Reads run.json there, trains, and writes rank0.journal beside it. It never opens the database. The exit
status says the outcome to the parent (0 ok, 10 oom, 11 diverged, 12 skipped, 13 hung, 1 crashed) and the journal's end
record says it to everybody.

A run of several ranks becomes their agent (harness.launch.group), and each rank comes through here again with its own
journal. By hand:  torchrun --nproc-per-node 2 -m harness.worker OUT/journals/KEY/N
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

for _name, _value in (("OMP_NUM_THREADS", "1"), ("OMP_WAIT_POLICY", "PASSIVE"), ("GOMP_SPINCOUNT", "0")):
    # Read when torch loads; threads that spin while they wait cost 40-fold on a busy machine.
    os.environ.setdefault(_name, _value)

import torch

from harness.launch import group
from harness.launch.base import EXIT_STATUS, WORKER
from harness.launch.child import limit_memory
from harness.parallel.group import await_last_words, communication_status, process_group
from harness.registry import PROBES, TASKS
from harness.run import Diverged, Skipped
from harness.spec import LimitsSpec, RunSpec
from results.environment import describe_environment
from results.journal import JournalWriter
from results.records import COMMUNICATION, ON_THIS_RANK

LAST_WORDS_S = 0.5
"""How long a rank that failed stays for the others to say what happened to them; twice that for one that lost them,
and never more than a tenth of limits.hang_s."""

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3


def preload() -> None:
    """Import what a run imports on its way (its task, the optimizer's dynamo): two seconds that a zygote spends
    once."""
    for name in TASKS:
        TASKS.load(name)
    for name in PROBES:
        PROBES.load(name)
    importlib.import_module("torch._dynamo")
    group.preload()


def run(run_dir: Path) -> int:
    """Carry out the run requested in `run_dir`, or one rank of it; returns the process's exit status."""
    request = json.loads((run_dir / "run.json").read_text())
    spec = RunSpec.model_validate(request["spec"])
    if spec.num_ranks == 1:
        return _carry_out(run_dir, request, spec, 0, nullcontext())
    if not group.is_rank():
        describe_environment()  # read once, for all ranks
        return group.run_group(run_dir, spec, WORKER)
    code = _carry_out(run_dir, request, spec, int(os.environ["RANK"]), _as_rank(run_dir, spec))
    if code != EXIT_STATUS["ok"]:
        group.leave(code)
    return code


@contextmanager
def _as_rank(run_dir: Path, spec: RunSpec) -> Iterator[None]:
    """The process group, and once it stands the memory limit."""
    with process_group(run_dir, spec):
        limit_memory(spec.limits.memory_bytes if spec.device == "cpu" else None)
        yield


def _carry_out(
    run_dir: Path,
    request: dict[str, Any],
    spec: RunSpec,
    rank: int,
    surroundings: AbstractContextManager[None],
) -> int:
    """Do the task and record how it ended."""
    journal = JournalWriter(run_dir / f"rank{rank}.journal")
    try:
        journal.start(describe_environment(), rank)
        torch.set_num_threads(spec.threads)
        keep_freed_memory()
        checkpoints = run_dir.parents[2] / "checkpoints"
        with surroundings:
            obsolete: list[Path] = TASKS.load(spec.task)(spec, request, journal, checkpoints)
    except Exception as error:
        status, reason = _outcome(error, spec)
        journal.end(status, reason)
        if spec.num_ranks > 1:
            stay_s = LAST_WORDS_S * (2 if reason.startswith(COMMUNICATION) else 1)
            await_last_words(run_dir, spec.num_ranks, min(stay_s, spec.limits.hang_s / 10))
    else:
        status = "ok"
        journal.end(status)
        for path in obsolete:
            path.unlink(missing_ok=True)
    journal.close()
    return EXIT_STATUS[status]


def _outcome(error: Exception, spec: RunSpec) -> tuple[str, str]:
    """(status, reason) of a run that ended with this error."""
    if isinstance(error, Diverged):
        return "diverged", f"{error}{ON_THIS_RANK if error.on_this_rank and spec.num_ranks > 1 else ''}"
    if isinstance(error, Skipped):
        return "skipped", str(error)
    traceback.print_exc()
    if _is_out_of_memory(error, spec.limits):
        return "oom", _out_of_memory(error, spec.limits)
    reason = f"{type(error).__name__}: {_first_line(error)}"
    status = communication_status(error) if spec.num_ranks > 1 else None
    return ("crashed", reason) if status is None else (status, f"{COMMUNICATION}{reason}")


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


if __name__ == "__main__":
    sys.exit(run(Path(sys.argv[1]).resolve()))
