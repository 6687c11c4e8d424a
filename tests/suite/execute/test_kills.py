"""Kills from outside: nothing lost, nothing twice, no orphan, and the same curve afterwards."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from suite.execute import Message

DRIVE = Path(__file__).with_name("drive.py")
STEPS = 12
MODES = pytest.mark.parametrize("mode", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])


def drive(bench, num_runs: int = 3, step_s: float = 0.04) -> subprocess.Popen[str]:
    command = [sys.executable, str(DRIVE), str(bench.out), str(num_runs), str(STEPS), str(step_s)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def until_started(bench, parent: subprocess.Popen[str], number: int) -> None:
    """Wait until so many workers have begun, over all commands so far; fail if the command ended instead."""
    until(lambda: len(bench.started()) >= number or parent.poll() is not None, f"{number} workers")
    assert parent.poll() is None, parent.communicate()


def until(condition: Callable[[], bool], what: str, limit_s: float = 20.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def family(pid: int) -> list[int]:
    """The process, its children and theirs."""
    found = [pid]
    for parent in found:
        try:
            found += map(int, Path(f"/proc/{parent}/task/{parent}/children").read_text().split())
        except OSError:
            continue
    return found


def assert_whole(bench, make, num_runs: int = 3) -> None:
    """Everything is done, and each curve is the one of an undisturbed run."""
    runs = [make(seed, steps=STEPS) for seed in range(num_runs)]
    outcome = bench.run(*runs)
    assert set(outcome.statuses.values()) == {"ok"}
    for run in runs:
        expected = [(step, 5.0 / (1 + step) + 0.001 * run.spec.seed) for step in range(1, STEPS + 1)]
        assert bench.store.curve(run.key, "loss") == expected
    _, twice = bench.store.query(
        "SELECT run_id, step, metric, scope FROM measurements GROUP BY ALL HAVING count(*) > 1"
    )
    assert twice == []


@pytest.mark.slow
@MODES
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_stores_everything(bench, make, mode, number, monkeypatch) -> None:
    monkeypatch.setenv("SUITE_LAUNCH", mode)
    parent = drive(bench)
    until_started(bench, parent, 2)
    time.sleep(0.1)
    pids = family(parent.pid)
    parent.send_signal(number)
    _, stderr = parent.communicate(timeout=20)
    assert parent.returncode == 130
    assert ("Ctrl-C" if number == signal.SIGINT else "SIGTERM") in stderr
    assert "Traceback" not in stderr
    assert not any(map(is_alive, pids))
    _, rows = bench.store.query("SELECT status, count(*) FROM runs GROUP BY ALL ORDER BY ALL")
    assert dict(rows).get("interrupted", 0) >= 1
    assert_whole(bench, make)


@pytest.mark.slow
@MODES
def test_kill_of_the_parent(bench, make, mode, monkeypatch) -> None:
    monkeypatch.setenv("SUITE_LAUNCH", mode)
    moments = random.Random(0)
    for _ in range(3):
        parent = drive(bench)
        until_started(bench, parent, len(bench.started()) + 1)
        time.sleep(moments.uniform(0.0, 0.4))
        pids = family(parent.pid)
        parent.kill()
        parent.communicate()
        until(lambda pids=pids: not any(map(is_alive, pids)), "no process of it is left", 5.0)
    assert_whole(bench, make)


@MODES
def test_kill_of_a_worker(bench, make, mode, monkeypatch) -> None:
    """Killed from outside once: the same command tries again, from the checkpoint."""
    monkeypatch.setenv("SUITE_LAUNCH", mode)
    run = make(0, steps=STEPS, step_s=0.03)
    killed = []

    def kill_first(event: object) -> None:
        bench.events.append(event)
        if type(event).__name__ == "Started" and not killed:
            until(lambda: len(list((bench.out / "checkpoints").iterdir())) > 3, "some steps")
            pid = bench.started()[-1][2]
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)

    outcome = bench.run(run, on_event=kill_first)
    assert outcome.statuses == {run.key: "ok"}
    assert (outcome.num_ran, outcome.exit_code) == (1, 0)
    (first, second) = bench.attempts(run)
    assert first[1] == "crashed" and "killed by signal 9" in first[2]
    assert second[:2] == (2, "ok")
    assert any("trying once more" in event.text for event in bench.events if isinstance(event, Message))
    resumed = [event.resume_step for event in bench.events if type(event).__name__ == "Started"]
    assert resumed[0] is None and resumed[1] >= 3
    assert_whole(bench, make, num_runs=1)


def test_a_worker_killed_twice_is_crashed(bench, make) -> None:
    run, other = make(0, steps=STEPS, step_s=0.03), make(1)

    def kill_all(event: object) -> None:
        if type(event).__name__ == "Started" and event.key == run.key:
            number = event.attempt
            until(lambda: (run.key, number) in [line[:2] for line in bench.started()], "started")
            os.kill(
                next(pid for key, attempt, pid in bench.started() if (key, attempt) == (run.key, number)), 9
            )

    outcome = bench.run(run, other, on_event=kill_all)
    assert outcome.statuses == {run.key: "crashed", other.key: "ok"}
    assert [status for _, status, _ in bench.attempts(run)] == ["crashed", "crashed"]
    assert outcome.exit_code == 3


def test_the_zygote_killed(bench, make, monkeypatch) -> None:
    monkeypatch.setenv("SUITE_LAUNCH", "fork")
    runs = [make(seed, steps=STEPS, step_s=0.03) for seed in range(2)]
    killed = []

    def kill_zygote(event: object) -> None:
        if type(event).__name__ == "Started" and not killed:
            until(lambda: len(bench.started()) > 0, "started")
            status = Path(f"/proc/{bench.started()[0][2]}/stat").read_text()
            killed.append(int(status.rsplit(")", 1)[1].split()[1]))
            os.kill(killed[0], signal.SIGKILL)

    outcome = bench.run(*runs, jobs=2, on_event=kill_zygote)
    assert set(outcome.statuses.values()) == {"ok"}
    assert len(bench.attempts(runs[0])) == 2
    assert_whole(bench, make, num_runs=2)


def test_two_commands_at_once_share_the_work(bench, make) -> None:
    parents = [drive(bench, num_runs=6, step_s=0.02) for _ in range(2)]
    for parent in parents:
        _, stderr = parent.communicate(timeout=40)
        assert parent.returncode == 0, stderr
    keys = [key for key, _, _ in bench.started()]
    assert sorted(keys) == sorted({*keys}) and len(keys) == 6, "each key was trained once"
    assert_whole(bench, make, num_runs=6)
