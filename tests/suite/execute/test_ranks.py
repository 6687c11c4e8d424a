"""What the scheduler does with runs of several ranks, whose processes are the fake worker's single one."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

import suite.execute.watch
from harness.launch import Exit
from harness.launch.base import EXIT_RANK_KILLED
from harness.parallel.flight import FlightWriter, flight_path
from harness.spec import LimitsSpec, ParallelismSpec
from results.journal import JournalWriter
from suite.execute import Finished, Started
from suite.execute.outcome import explain
from suite.execute.resources import slots_of, visible_gpus
from suite.execute.scheduler import _says_its_end
from suite.execute.watch import Watch

TWO = ParallelismSpec(dp=2)


def test_slots() -> None:
    assert [slots_of(ranks, "cpu", 2) for ranks in (1, 2, 4)] == [1, 2, 2], "at least one run always runs"
    assert slots_of(8, "cuda", 1) == 1


@pytest.mark.parametrize(
    ("value", "number"), [("0,1,3", 3), ("", 0), ("-1", 0), ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", 1)]
)
def test_visible_gpus(monkeypatch: pytest.MonkeyPatch, value: str, number: int) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert visible_gpus() == number


def test_a_group_takes_a_slot_a_rank(bench: Any, make: Any) -> None:
    """Longest first: a run of one rank, then the group, which waits for both slots; nothing overtakes it."""
    first, group, last = make(0, 40, step_s=0.02), make(1, 30, parallelism=TWO), make(2, 20)
    outcome = bench.run(first, group, last, jobs=2)
    assert outcome.exit_code == 0
    order = [
        (type(event).__name__, event.key) for event in bench.events if isinstance(event, Started | Finished)
    ]
    assert order == [(name, run.key) for run in (first, group, last) for name in ("Started", "Finished")]


def test_a_group_killed_from_outside_is_tried_once_more(bench: Any, make: Any) -> None:
    run = make(0, do="rank-killed", parallelism=TWO)
    assert bench.run(run).exit_code == 3
    reason = "rank 1 was killed by signal 9 at step 1"
    assert bench.attempts(run) == [(1, "crashed", reason), (2, "crashed", reason)]


def test_the_kernel_killed_a_rank_for_memory(tmp_path: Path) -> None:
    journal = JournalWriter(tmp_path / "rank0.journal")
    journal.end("crashed", "rank 1 was killed by signal 9 at step 5")
    exit = Exit(tmp_path, EXIT_RANK_KILLED)
    assert explain(exit, None, 0).try_again
    ending = explain(exit, None, 1)
    assert (ending.status, ending.try_again, ending.overrides) == ("oom", False, True)
    assert ending.reason.startswith(
        "rank 1 was killed by signal 9 at step 5, by the kernel's out-of-memory killer"
    )


def test_whose_word_counts(tmp_path: Path) -> None:
    """A group's agent speaks in rank 0's journal; when it was stopped or killed, what stands there is rank 0's."""
    assert not _says_its_end(Exit(tmp_path, 1), 2, False)
    journal = JournalWriter(tmp_path / "rank0.journal")
    journal.end("crashed", "communication failed: connection closed")
    assert _says_its_end(Exit(tmp_path, 1), 2, False)
    assert not _says_its_end(Exit(tmp_path, 1), 2, True)
    assert not _says_its_end(Exit(tmp_path, -9), 2, False)
    assert not _says_its_end(Exit(tmp_path, None), 2, False)
    assert _says_its_end(Exit(tmp_path, 0), 2, True), "it was done before it could be stopped"
    assert _says_its_end(Exit(tmp_path, -9), 1, True), "a single process speaks for itself"


class _Launcher:
    mode = "none"

    def is_started(self, run_dir: Path) -> bool:
        return True

    def signal(self, run_dir: Path, number: int) -> None:
        pass


def test_one_silent_rank_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    journals = [JournalWriter(tmp_path / f"rank{rank}.journal") for rank in (0, 1)]
    flights = [FlightWriter(flight_path(tmp_path, rank), rank, 2) for rank in (0, 1)]
    flights[0].at_step(4)
    flights[0].begin("all_reduce", 8, "float32", (0, 1))
    watch = Watch(tmp_path, LimitsSpec(hang_s=10), _Launcher(), num_ranks=2)  # type: ignore[arg-type]
    for journal in journals:
        journal.measure(1, {"loss": 1.0})
    watch.look()
    for _ in range(3):
        now += 4
        journals[0].measure(2, {"loss": 1.0})
        watch.look()
    assert watch.stopped == (
        "hung",
        "rank 1 did not come to all_reduce #1 of ranks 0,1 (8 bytes) at step 4; the other waits for it; "
        "no sign of life for 12 s (limits.hang_s is 10)",
    )


def test_a_rank_may_be_late_to_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    watch = Watch(tmp_path, LimitsSpec(hang_s=10), _Launcher(), num_ranks=2)  # type: ignore[arg-type]
    watch.look()
    journal = JournalWriter(tmp_path / "rank0.journal")
    while now < 100 + suite.execute.watch.START_UP_S:
        now += 5
        journal.measure(1, {"loss": 1.0})
        watch.look()
        assert watch.stopped is None
    now += 12
    journal.measure(1, {"loss": 1.0})
    watch.look()
    assert watch.stopped is not None and watch.stopped[0] == "hung"
