"""Ranks for tests: forked processes on gloo with the recording backend.

results = run_ranks(2, train, spec)      # [train(spec) on rank 0, ... on rank 1]
"""

from __future__ import annotations

import os
import pickle
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

LIMIT_S = 60.0


class RankError(AssertionError):
    """A rank failed; the message is its traceback."""


def run_ranks(
    num_ranks: int, function: Callable[..., Any], *args: Any, limit_s: float = LIMIT_S
) -> list[Any]:
    """`function(*args)` on each of `num_ranks` forked ranks that have a default process group; their results in order.

    A rank that raises fails the test with its traceback; past `limit_s` all are killed.
    """
    context = get_context("fork")
    with TemporaryDirectory() as folder:
        ranks, pipes = [], []
        for rank in range(num_ranks):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank, args=(rank, num_ranks, Path(folder), theirs, function, args), daemon=True
            )
            process.start()
            theirs.close()
            ranks.append(process)
            pipes.append(ours)
        try:
            return _collect(pipes, time.monotonic() + limit_s)
        finally:
            for process in ranks:
                process.join(0.5)
                if process.is_alive():
                    process.kill()
                    process.join()


def _collect(pipes: list[Connection], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        left = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = wait(left, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            missing = [rank for rank in range(len(pipes)) if rank not in results]
            raise RankError(f"ranks {missing} did not end in time")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = pipes.index(pipe)
            try:
                ok, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                raise RankError(f"rank {rank} died without a word") from None
            if not ok:
                raise RankError(f"rank {rank}:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(pipes))]


def _rank(
    rank: int,
    num_ranks: int,
    folder: Path,
    pipe: Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    import torch
    import torch.distributed as dist

    from harness.parallel import recorder

    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"], os.environ["RANK"] = str(rank), str(rank)
    os.environ["WORLD_SIZE"] = str(num_ranks)
    try:
        dist.init_process_group(
            recorder.register("cpu"),
            store=dist.FileStore(str(folder / "store"), num_ranks),
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=LIMIT_S),
        )
        message = (True, function(*args))
    except BaseException:
        message = (False, traceback.format_exc())
    try:
        data = pickle.dumps(message)
    except Exception:
        data = pickle.dumps((False, traceback.format_exc()))
    pipe.send_bytes(data)
    pipe.close()
    os._exit(0)  # a group that another rank left is not worth tearing down


@pytest.fixture(name="run_ranks")
def run_ranks_fixture() -> Callable[..., list[Any]]:
    """`run_ranks`, for tests that cannot import this file."""
    return run_ranks
