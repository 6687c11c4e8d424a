"""The process group of a rank: opened before its task, closed after it, recorded in between.

    with process_group(run_dir, spec):
        ...the task; torch.distributed is initialised...

RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say where the others are; harness.launch.group or torchrun sets them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from harness.parallel import recorder
from harness.parallel.flight import FlightWriter, flight_path
from harness.spec import FaultSpec, RunSpec

TIMEOUT_SHARE = 0.8
"""A collective may take this part of limits.hang_s: the ranks that wait speak before the run is found silent."""

MARKS = ("gloo/", "Gloo ", "NCCL", "Connection closed by peer", "Connection reset by peer", "Broken pipe")
TIMEOUT_MARKS = ("Timed out", "timed out", "timeout", "Timeout")

_flight: FlightWriter | None = None
"""Of the open process group."""


@contextmanager
def process_group(run_dir: Path, spec: RunSpec) -> Iterator[None]:
    """Connect this rank to the others of its run; wait for them at the end.

    After an error nothing is tidied up, since that would wait for peers: the process has to end.
    """
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if num_ranks != spec.num_ranks:
        raise ValueError(f"the run needs {spec.num_ranks} ranks, and {num_ranks} were started")
    global _flight
    _flight = FlightWriter(flight_path(run_dir, rank), rank, num_ranks)
    recorder.write_to(_flight)
    if spec.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    timeout = timedelta(seconds=TIMEOUT_SHARE * spec.limits.hang_s)
    dist.init_process_group(recorder.register(spec.device, timeout), timeout=timeout)
    yield
    with recorder.control():
        dist.barrier()  # whoever left one out is still noticed here
    dist.destroy_process_group()
    recorder.write_to(None)
    _flight = None
    flight_path(run_dir, rank).unlink()


def at_step(step: int, fault: FaultSpec | None) -> None:
    """A training step begins: the flight file says so, and a rank that is to leave out a collective prepares for it."""
    if _flight is not None:
        _flight.at_step(step)
    if (
        fault is not None
        and (fault.kind, fault.step) == ("skip-collective", step)
        and this_rank() == fault.rank
    ):
        recorder.skip_next()


def this_rank() -> int:
    """Rank of this process, 0 where there is but one."""
    return dist.get_rank() if dist.is_initialized() else 0


def communication_status(error: BaseException) -> str | None:
    """`hung` when a collective took too long, `crashed` when it failed, None when the error is another."""
    texts: list[str] = []
    seen: BaseException | None = error
    while seen is not None and len(texts) < 10:  # pipelining wraps the errors of its stages
        texts.append(str(seen))
        if isinstance(seen, dist.DistError):
            texts.append("NCCL")
        seen = seen.__cause__ or seen.__context__
    text = "\n".join(texts)
    if not any(mark in text for mark in MARKS):
        return None
    return "hung" if any(mark in text for mark in TIMEOUT_MARKS) else "crashed"


def await_last_words(run_dir: Path, num_ranks: int, limit_s: float) -> None:
    """Wait until every rank of the run has said how it ended, or `limit_s`.

    A rank that fails because of another must not be the first that the agent sees end, and ranks that fail alike
    shall all be heard.
    """
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if all(_has_ended(run_dir / f"rank{rank}.journal") for rank in range(num_ranks)):
            return
        time.sleep(0.01)


def _has_ended(journal: Path) -> bool:
    try:
        with journal.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
            return b'{"k":"end"' in file.read()
    except OSError:
        return False
