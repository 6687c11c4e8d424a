"""One real training step on real ranks: its memory by category, its collectives, its operations and its time.

The first step makes the optimizer's states, the next ones are timed, and the last ones are followed storage by storage
(harness.trace.live): the one with the smallest peak counts. What a rank saw goes to rank 0, which records all under the
names that `ledger` and `trace` use.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import torch

from harness.ledger.step import RankStep, record
from harness.parallel import recorder
from harness.parallel.group import this_rank
from harness.run import Quiet, Run
from harness.spec import RunSpec
from harness.tasks import pretrain
from harness.trace.allocator import Allocator, watched
from harness.trace.exchange import gathered
from harness.trace.follow import TRIES, follow
from harness.trace.lives import Account
from harness.trace.stored import from_json, to_json
from harness.trace.summary import describe, rank_step, record_per_parameter
from results.journal import JournalWriter

NUM_TIMED = 3
"""Steps whose median is step_ms."""


def step(spec: RunSpec, request: dict[str, Any], journal: JournalWriter, checkpoints: Path) -> list[Path]:
    """Measure a step of `spec`; leaves no files."""
    rank = this_rank()
    spec = spec.model_copy(update={"val_tokens": 0})
    run = pretrain.prepare(spec, request, Quiet(journal) if rank else journal, checkpoints)
    last = NUM_TIMED + 2
    pretrain.training_step(run, 1)
    seconds = [_timed(run, number) for number in range(2, last)]
    tries = [_followed(run, number) for number in range(last, last + TRIES)]
    one, held, allocator = min(tries, key=lambda each: each[0].total)
    ranks = [from_json(each)[0] for each in gathered(to_json([one]), run.device)]
    if rank == 0:
        journal.measure(last, {"step_ms": 1000 * statistics.median(seconds)})
        record(journal, ranks, last)
        record_per_parameter(journal, spec, ranks, last)
        journal.note(
            "peak_of_tries", [each.total for each, _, _ in tries], "rank 0's peaks; the smallest one counts"
        )
        journal.note("largest_at_peak", describe(held), "the largest tensors of rank 0 at its peak")
        if run.device.type == "cuda":
            _record_allocator(journal, allocator, held.total, last)
    return []


def _followed(run: Run, number: int) -> tuple[RankStep, Account, Allocator]:
    """One step, storage by storage."""
    with (
        watched(run.device) as allocator,
        recorder.recording() as calls,
        follow(run.strategy, run.optimizer, run.device) as followed,
    ):
        pretrain.training_step(run, number)
    held = followed.account()
    collectives = recorder.collectives(calls, run.spec.parallelism)
    return rank_step(this_rank(), held, followed.flops, collectives), held, allocator


def _timed(run: Run, number: int) -> float:
    """Seconds of one step."""
    _wait(run.device)
    started = time.perf_counter()
    pretrain.training_step(run, number)
    _wait(run.device)
    return time.perf_counter() - started


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _record_allocator(journal: JournalWriter, allocator: Allocator, tensors: int, step: int) -> None:
    """Rank 0's allocator: its peaks (allocator.NAME), and what it holds beyond the tensors' sum (residue.NAME)."""
    for name in ("allocated", "requested", "active", "reserved"):
        journal.measure(step, {"peak_bytes": getattr(allocator, name)}, scope=f"allocator.{name}")
    for name, num_bytes in allocator.residue(tensors).items():
        journal.measure(step, {"peak_bytes": num_bytes}, scope=f"residue.{name}")
    journal.note("largest_blocks", list(allocator.blocks), "the allocator's largest blocks at its peak")
