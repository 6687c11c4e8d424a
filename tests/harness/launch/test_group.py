"""Runs of two ranks with the real worker and a stand-in for its task (ranks_worker.py)."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.launch import Exit, Launcher, Request, open_launcher
from harness.launch.base import EXIT_RANK_KILLED, worker_environment
from harness.spec import FaultSpec, LimitsSpec, ModelSpec, ParallelismSpec, PrecisionSpec, RunSpec
from results.journal import read_journal

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="groups are forked on Linux")

HERE = Path(__file__).parent
MODEL = ModelSpec(name="tiny", num_layers=1, d_model=8, num_heads=1, num_kv_heads=1, d_ffn=8)
LIMIT_S = 60.0


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    """One zygote for all: it imports torch once. The suite may itself have been started as a rank of something."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(HERE))
        patch.setenv("RANK", "3")
        patch.setenv("WORLD_SIZE", "8")
        opened = open_launcher("fork", worker="ranks_worker")
        yield opened
        opened.close()


@pytest.fixture
def make_group(tmp_path: Path) -> Any:
    (tmp_path / "checkpoints").mkdir()

    def make(
        num_ranks: int = 2, num_steps: int = 6, labels: dict[str, Any] | None = None, **fields: Any
    ) -> Path:
        run_dir = tmp_path / "journals" / f"{len([*tmp_path.glob('journals/*')])}" / "1"
        run_dir.mkdir(parents=True)
        spec = RunSpec(
            model=MODEL,
            precision=PrecisionSpec(name="fp32"),
            parallelism=ParallelismSpec(dp=num_ranks),
            tokens=num_steps * 2,
            batch_size=1,
            seq_len=2,
            **fields,
        )
        request = {
            "key": run_dir.parent.name,
            "attempt": 1,
            "labels": labels or {},
            "spec": spec.model_dump(mode="json"),
        }
        (run_dir / "run.json").write_text(json.dumps(request))
        return run_dir

    return make


def finish(launcher: Launcher, run_dir: Path) -> Exit:
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        for exit in launcher.wait(0.5):
            assert exit.run_dir == run_dir
            until(lambda: no_process(run_dir), "no rank is left (a death takes the kernel a moment)")
            return exit
    raise AssertionError("the group never ended")


def records(run_dir: Path, rank: int, kind: str) -> list[dict[str, Any]]:
    path = run_dir / f"rank{rank}.journal"
    return [record for record in read_journal(path).records if record["k"] == kind] if path.exists() else []


def pids(run_dir: Path) -> dict[int, int]:
    """Rank -> process, of the ranks that have begun."""
    starts = {rank: records(run_dir, rank, "start") for rank in range(4)}
    return {rank: start[0]["pid"] for rank, start in starts.items() if start}


def no_process(run_dir: Path) -> bool:
    """Whether the ranks are gone, to the last."""
    return not any(is_alive(pid) for pid in pids(run_dir).values())


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def until(condition: Any, what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.02)


def test_a_healthy_group(launcher: Launcher, make_group: Any) -> None:
    run_dir = make_group(labels={"step_s": 0.1})
    launcher.start(Request(run_dir))
    until(lambda: launcher.wait(0.02) == [] and len(pids(run_dir)) == 2, "both have begun")
    ranks = pids(run_dir)
    groups = {(os.getsid(pid), os.getpgid(pid)) for pid in ranks.values()}
    (parents,) = {
        Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1] for pid in ranks.values()
    }
    assert groups == {(int(parents), int(parents))}, "the agent leads the group that ends with it"
    assert finish(launcher, run_dir).code == 0
    for rank in (0, 1):
        (start,) = records(run_dir, rank, "start")
        assert start["rank"] == rank
        assert start["environment"]["details"]["variables"]["OMP_WAIT_POLICY"] == "PASSIVE"
        assert [(end["status"], end["reason"]) for end in records(run_dir, rank, "end")] == [("ok", "")]
        losses = [record["v"]["loss"] for record in records(run_dir, rank, "m")]
        assert losses == [step + 0.5 for step in range(1, 7)]
    assert (run_dir / "stderr.txt").read_text() == ""
    assert not [path for path in run_dir.iterdir() if path.is_dir()], "the launcher's own folder is gone"


SKIPPED = r"rank 1 left out {} of ranks 0,1 \({} bytes\) at step 3; what the ranks exchanged then did not fit"


@pytest.mark.parametrize(
    ("kind", "labels", "limits", "code", "status", "reason"),
    [
        ("kill", {}, {}, EXIT_RANK_KILLED, "crashed", "rank 1 was killed by signal 9 at step 3"),
        ("crash", {}, {}, 1, "crashed", r"rank 1 was killed by signal 6 \(SIGABRT\) at step 3"),
        ("nan", {}, {}, 11, "diverged", "the loss is nan at step 3, first on rank 1"),
        ("oom", {}, {"memory_bytes": 2**29}, 10, "oom", r"rank 1: more than 537 MB \(limits.memory_bytes\): .*"),
        (
            *("hang", {}, {"hang_s": 4.0}, 13, "hung"),
            r"rank 1 did not come to all_reduce #9 of ranks 0,1 \(4,096 bytes\) at step 3; the other waits for it",
        ),
        ("skip-collective", {}, {}, 1, "crashed", SKIPPED.format("all_reduce #9", "4,096")),
        # All the same size: they pair up, off by one, until somebody is through.
        (
            *("skip-collective", {"sizes": [1, 1]}, {"hang_s": 6.0}, 13, "hung"),
            r"rank 1 left out one of all_reduce #7 to #9 of ranks 0,1 \(4 bytes\) at step 3; the other waits for it",
        ),
    ],
)  # fmt: skip
def test_a_group_that_fails(
    launcher: Launcher,
    make_group: Any,
    kind: Any,
    labels: Any,
    limits: Any,
    code: int,
    status: str,
    reason: str,
) -> None:
    fault = FaultSpec(kind=kind, step=3, rank=1)
    run_dir = make_group(labels=labels, fault=fault, limits=LimitsSpec(**limits))
    launcher.start(Request(run_dir, limits.get("memory_bytes")))
    exit = finish(launcher, run_dir)
    last = records(run_dir, 0, "end")[-1]
    assert last["status"] == status
    assert re.fullmatch(reason, last["reason"]), last["reason"]
    assert exit.code == code


def test_an_error_that_every_rank_has_names_none(launcher: Launcher, make_group: Any) -> None:
    run_dir = make_group(labels={"sizes": ["many"]})
    launcher.start(Request(run_dir))
    assert finish(launcher, run_dir).code == 1
    last = records(run_dir, 0, "end")[-1]
    assert last["status"] == "crashed"
    assert last["reason"].startswith("TypeError: ")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_agent_takes_its_ranks_along(launcher: Launcher, make_group: Any, number: signal.Signals) -> None:
    run_dir = make_group(num_steps=1000, labels={"step_s": 0.1})
    launcher.start(Request(run_dir))
    until(lambda: launcher.wait(0.02) == [] and len(pids(run_dir)) == 2, "both have begun")
    (agent,) = {os.getpgid(pid) for pid in pids(run_dir).values()}
    os.kill(agent, number)
    assert finish(launcher, run_dir).code == -number


@pytest.mark.slow
@pytest.mark.parametrize("fault", [None, FaultSpec(kind="nan", step=2, rank=1)])
def test_torchrun_by_hand(make_group: Any, monkeypatch: pytest.MonkeyPatch, fault: FaultSpec | None) -> None:
    run_dir = make_group(fault=fault)
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ended = subprocess.run(
        [*command, "-m", "ranks_worker", str(run_dir)],
        env=worker_environment(),
        capture_output=True,
        check=False,
    )
    assert (ended.returncode == 0) == (fault is None), ended.stderr.decode()
    status = "ok" if fault is None else "diverged"
    assert [records(run_dir, rank, "end")[-1]["status"] for rank in (0, 1)] == [status] * 2
    assert no_process(run_dir)


def test_another_number_of_ranks_is_refused(launcher: Launcher, make_group: Any, monkeypatch: Any) -> None:
    from harness.parallel.group import process_group

    run_dir = make_group()
    spec = RunSpec.model_validate(json.loads((run_dir / "run.json").read_text())["spec"])
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match="needs 2 ranks, and 4 were started"), process_group(run_dir, spec):
        pass
