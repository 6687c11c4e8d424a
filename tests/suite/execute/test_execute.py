"""What becomes of each run of a plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import harness.launch.base
import suite.execute.watch
from harness.spec import LimitsSpec, ParallelismSpec
from results.store import Store
from suite.execute import Message, Started
from suite.execute.folder import FolderError, OutFolder, key_lock


def test_runs_all_and_then_nothing(bench, make) -> None:
    runs = [make(seed) for seed in range(3)]
    outcome = bench.run(*runs, jobs=2)
    assert (outcome.num_ran, outcome.num_done_before, outcome.num_failed, outcome.exit_code) == (3, 0, 0, 0)
    assert set(outcome.statuses.values()) == {"ok"}
    assert sorted(event.index for event in bench.finished) == [1, 2, 3]
    assert {event.peak_bytes for event in bench.finished} == {3.0 * 2**20}
    assert bench.store.curve(runs[1].key, "loss") == [(1, 2.501), (2, 5 / 3 + 0.001)]
    again = bench.run(*runs)
    assert (again.num_ran, again.num_done_before, again.exit_code) == (0, 3, 0)
    assert bench.events == []
    assert len(bench.started()) == 3


def test_run_json(bench, make) -> None:
    run = make(0)
    bench.run(run, command="suite run test.yaml --size laptop")
    request = json.loads((bench.out / "journals" / run.key / "1" / "run.json").read_text())
    assert request["run_id"] == f"{run.key}.1"
    assert (request["case"], request["size"], request["role"]) == ("test", "laptop", "arm")
    assert request["spec"] == run.spec.model_dump(mode="json")
    assert request["command"] == "suite run test.yaml --size laptop"
    assert request["auto"]["launch"] == {"value": "fork", "reason": "SUITE_LAUNCH is set"}
    assert set(request["auto"]) == {"size", "launch", "jobs"}
    assert all(choice["reason"] for choice in request["auto"].values())


def test_longest_first_and_base_before_arms(bench, make) -> None:
    base = make(0, steps=2)
    arm = make(1, steps=50, base=base)
    short, long = make(2, steps=3), make(3, steps=30)
    bench.run(base, short, long, arm, jobs=1)
    assert [key for key, _, _ in bench.started()] == [base.key, arm.key, long.key, short.key]
    request = json.loads((bench.out / "journals" / arm.key / "1" / "run.json").read_text())
    assert request["start_checkpoint"] == bench.store.final_checkpoint(base.key) is not None


def test_side_by_side(bench, make) -> None:
    bench.run(make(0, step_s=0.2), make(1, step_s=0.2), make(2, step_s=0.2), jobs=2)
    order = [(type(event).__name__, event.key) for event in bench.events]
    assert [name for name, _ in order[:3]] == ["Started", "Started", "Finished"]


@pytest.mark.parametrize("mode", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_every_status_with_its_reason(bench, make, mode, monkeypatch) -> None:
    monkeypatch.setenv("SUITE_LAUNCH", mode)
    monkeypatch.setattr(suite.execute.watch, "GRACE_S", 0.3)
    monkeypatch.setattr(suite.execute.scheduler, "nvidia_visible", lambda: True)
    monkeypatch.setattr(suite.execute.scheduler, "visible_gpus", lambda: 1)
    tight = {"hang_s": 0.6, "time_s": 20.0}
    runs = {
        "ok": make(0),
        "hung": make(1, do="hang", limits=LimitsSpec(**tight)),
        "timeout": make(2, do="spin", limits=LimitsSpec(time_s=1.5)),
        "crashed": make(3, do="raise"),
        "oom": make(4, do="memory", limits=LimitsSpec(memory_bytes=64 * 2**20)),
        "diverged": make(5, do="nan"),
        "silent": make(6, do="silent"),
        "segv": make(7, do="segv"),
        "skipped": make(8, device="cuda", parallelism=ParallelismSpec(dp=4)),
    }
    outcome = bench.run(*runs.values(), jobs=4)
    rows = {name: bench.store.status_of([run.key])[run.key] for name, run in runs.items()}
    expected = {name: name for name in runs} | {"silent": "crashed", "segv": "crashed"}
    assert {name: row.status for name, row in rows.items()} == expected
    assert "no sign of life" in rows["hung"].reason
    assert "still running after 1.5 s" in rows["timeout"].reason
    assert rows["crashed"].reason == "exit status 1: RuntimeError: this worker was told to fail"
    assert rows["oom"].reason == "address space exhausted"
    assert rows["diverged"].reason == "loss is NaN at step 1"
    assert rows["silent"].reason == "the worker ended without saying how"
    assert "signal 11 (SIGSEGV)" in rows["segv"].reason
    assert rows["skipped"].reason == "it needs 4 GPUs, one a rank; visible here: 1"
    assert (outcome.num_failed, outcome.exit_code) == (8, 3)
    assert all(len(bench.attempts(run)) == 1 for run in runs.values()), (
        "none of these was killed from outside"
    )
    # The journals alone, taken elsewhere, say the same.
    elsewhere = Store(bench.out / "elsewhere.duckdb")
    elsewhere.ingest_tree(bench.out / "journals")
    told = {row.key: (row.status, row.reason) for row in elsewhere.runs()}
    assert told == {row.key: (row.status, row.reason) for row in rows.values() if row.status != "skipped"}


def test_which_are_tried_again(bench, make) -> None:
    runs = {name: make(seed, do=name) for seed, name in enumerate(("ok", "nan", "oom", "raise"))}
    bench.run(*runs.values())
    second = bench.run(*runs.values())
    assert (second.num_ran, second.num_done_before, second.exit_code) == (1, 3, 3)
    assert len(bench.attempts(runs["raise"])) == 2
    third = bench.run(*runs.values(), retry=True)
    assert third.num_ran == 3
    assert [len(bench.attempts(run)) for run in runs.values()] == [1, 2, 2, 3]


def test_failed_base_skips_its_dependants(bench, make) -> None:
    base = make(0, do="raise")
    middle = make(1, base=base)
    last = make(2, base=middle)
    other = make(3)
    outcome = bench.run(base, middle, last, other)
    assert [outcome.statuses[run.key] for run in (base, middle, last, other)] == [
        "crashed",
        "skipped",
        "skipped",
        "ok",
    ]
    assert bench.store.status_of([middle.key])[middle.key].reason == f"its base {base.key} is crashed"
    assert bench.store.status_of([last.key])[last.key].reason == f"its base {middle.key} is skipped"
    mended = [make(0), make(1, base=make(0)), make(2, base=make(1, base=make(0)))]
    assert [run.key for run in mended] == [base.key, middle.key, last.key]
    assert set(bench.run(*mended, other).statuses.values()) == {"ok"}


def test_resumes_from_checkpoint_with_the_same_curve(bench, make) -> None:
    interrupted = make(0, steps=6, do="hang", at=4, step_s=0.02, limits=LimitsSpec(hang_s=0.5))
    bench.run(interrupted)
    assert bench.attempts(interrupted)[0][1] == "hung"
    bench.run(make(0, steps=6))
    started = [event for event in bench.events if isinstance(event, Started)]
    assert [(event.attempt, event.resume_step) for event in started] == [(2, 3)]
    assert bench.store.curve(interrupted.key, "loss") == [(step, 5.0 / (1 + step)) for step in range(1, 7)]
    steps_of_second = bench.store.query(
        "SELECT min(step) FROM measurements WHERE run_id = ? AND metric = 'loss'", [f"{interrupted.key}.2"]
    )
    assert steps_of_second[1] == [(4,)]


def test_missing_resume_checkpoint_means_from_the_start(bench, make) -> None:
    run = make(0, steps=6, do="hang", at=4, step_s=0.02, limits=LimitsSpec(hang_s=0.5))
    bench.run(run)
    for path in (bench.out / "checkpoints").iterdir():
        path.unlink()
    assert bench.run(make(0, steps=6)).statuses == {run.key: "ok"}
    assert len(bench.store.curve(run.key, "loss")) == 6


def test_base_whose_checkpoint_is_gone_is_trained_again(bench, make) -> None:
    base = make(0)
    bench.run(base)
    for path in (bench.out / "checkpoints").iterdir():
        path.unlink()
    assert bench.run(base).num_ran == 0, "nobody needs it"
    outcome = bench.run(base, make(1, base=base))
    assert set(outcome.statuses.values()) == {"ok"}
    assert len(bench.attempts(base)) == 2
    assert any("checkpoint is gone" in event.text for event in bench.events if isinstance(event, Message))


def test_journals_of_a_dead_command_are_taken_in(bench, make) -> None:
    """As after kill -9 of the parent: a folder with a journal that has no end, and one without run.json."""
    run = make(0, steps=6, do="hang", at=4, step_s=0.02, limits=LimitsSpec(hang_s=0.5))
    bench.run(run)
    (bench.out / "suite.duckdb").unlink()
    journal = bench.out / "journals" / run.key / "1" / "rank0.journal"
    lines = journal.read_bytes().splitlines(keepends=True)
    assert b'"end"' in lines[-1]
    journal.write_bytes(b"".join(lines[:-1]))
    (bench.out / "journals" / run.key / "2").mkdir()
    outcome = bench.run(make(0, steps=6))
    assert outcome.statuses == {run.key: "ok"}
    attempts = bench.attempts(run)
    assert [(number, status) for number, status, _ in attempts] == [(1, "interrupted"), (3, "ok")]
    assert len(bench.store.curve(run.key, "loss")) == 6


def test_a_key_under_lock_is_waited_for(bench, make) -> None:
    run, other = make(0), make(1)
    folder = OutFolder(bench.out)
    folder.create()
    lock = key_lock(folder, run.key)
    assert lock.acquire()
    told = []

    def release_when_told(event: object) -> None:
        if isinstance(event, Message):
            told.append(event.text)
            assert bench.started() == [] or bench.started()[0][0] == other.key
            lock.release()

    outcome = bench.run(run, other, on_event=release_when_told)
    assert set(outcome.statuses.values()) == {"ok"}
    assert [run.key in text and "another command" in text for text in told] == [True]


def test_unwritable_out_folder(bench, make, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    bench.out = tmp_path / "file" / "out"
    with pytest.raises(FolderError, match="choose another with --out"):
        bench.run(make(0))


def test_plan_without_runs(bench) -> None:
    assert bench.run().exit_code == 5


def test_worker_name_is_the_real_one() -> None:
    assert harness.launch.base.WORKER == "harness.worker"
