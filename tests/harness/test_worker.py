"""The worker process: exit status, end record, what becomes of errors. Whole runs: tests/harness/tasks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from harness import worker
from harness.registry import TASKS
from harness.run import Diverged, Skipped
from harness.spec import LimitsSpec, ModelSpec, PrecisionSpec, RunSpec
from results.journal import JournalWriter, read_journal

SPEC = RunSpec(
    model=ModelSpec(name="tiny", num_layers=1, d_model=16, num_heads=2, num_kv_heads=1, d_ffn=24),
    precision=PrecisionSpec(name="fp32"),
    tokens=64,
    batch_size=2,
    seq_len=16,
    val_tokens=0,
)

Task = Callable[[RunSpec, dict[str, Any], Any, Path], list[Path]]
RunTask = Callable[..., tuple[int, str, str]]


def run_folder(out: Path, spec: RunSpec = SPEC) -> Path:
    folder = out / "journals" / spec.key / "1"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"key": spec.key, "spec": spec.model_dump(mode="json")}))
    return folder


def end_of(folder: Path) -> tuple[str, str]:
    last = read_journal(folder / "rank0.journal").records[-1]
    assert last["k"] == "end"
    return last["status"], last["reason"]


@pytest.fixture
def run_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunTask:
    """Let the worker carry out a task made for the test: (exit status, status, reason)."""

    def run(task: Task, spec: RunSpec = SPEC) -> tuple[int, str, str]:
        monkeypatch.setattr(TASKS, "load", lambda _name: task)
        folder = run_folder(tmp_path, spec)
        return worker.run(folder), *end_of(folder)

    return run


def raising(error: BaseException) -> Task:
    def task(*_: object) -> list[Path]:
        raise error

    return task


@pytest.mark.parametrize(
    ("error", "code", "status", "reason"),
    [
        (Diverged("the loss is nan at step 3"), 11, "diverged", "the loss is nan at step 3"),
        (Skipped("compute capability 8.9 is needed"), 12, "skipped", "compute capability 8.9 is needed"),
        (MemoryError(), 10, "oom", "MemoryError"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried\nmore"), 10, "oom", "CUDA out of memory. Tried"),
        (
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"
            ),
            10,
            "oom",
            "DefaultCPUAllocator: can't allocate memory",
        ),
        (OSError(12, "Cannot allocate memory"), 10, "oom", "[Errno 12] Cannot allocate memory"),
        (ValueError("no such thing\nmore"), 1, "crashed", "ValueError: no such thing"),
        (RuntimeError(), 1, "crashed", "RuntimeError: RuntimeError"),
        (
            RuntimeError("could not create a primitive"),
            1,
            "crashed",
            "RuntimeError: could not create a primitive",
        ),
    ],
)
def test_errors_become_outcomes(
    run_task: RunTask,
    error: BaseException,
    code: int,
    status: str,
    reason: str,
) -> None:
    assert run_task(raising(error)) == (code, status, reason)


def test_under_a_memory_limit_the_reason_names_it(run_task: RunTask) -> None:
    """oneDNN, denied memory, does not say so."""
    spec = SPEC.model_copy(update={"limits": LimitsSpec(memory_bytes=70_000_000)})
    reason = "more than 70 MB (limits.memory_bytes): could not create a primitive"
    assert run_task(raising(RuntimeError("could not create a primitive")), spec) == (10, "oom", reason)


def test_an_unknown_task_names_those_there_are(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, SPEC.model_copy(update={"task": "pretrian"}))
    assert worker.run(folder) == 1
    status, reason = end_of(folder)
    assert status == "crashed" and "pretrain" in reason


def test_what_a_task_is_given(run_task: RunTask, tmp_path: Path) -> None:
    seen: list[Any] = []
    threads = torch.get_num_threads()
    spec = SPEC.model_copy(update={"threads": threads + 1})

    def task(spec: RunSpec, request: dict[str, Any], journal: Any, checkpoints: Path) -> list[Path]:
        seen.extend((spec, request["key"], checkpoints, torch.get_num_threads()))
        return []

    assert run_task(task, spec) == (0, "ok", "")
    assert seen == [spec, spec.key, tmp_path / "checkpoints", threads + 1]
    torch.set_num_threads(threads)


def test_the_journal_starts_with_the_environment(run_task: RunTask, tmp_path: Path) -> None:
    run_task(lambda *_: [])
    first = read_journal(tmp_path / "journals" / SPEC.key / "1" / "rank0.journal").records[0]
    assert first["k"] == "start" and first["rank"] == 0
    assert first["environment"]["torch"] == torch.__version__
    assert first["pid"] == os.getpid()


def test_obsolete_files_go_once_the_end_is_recorded(
    run_task: RunTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resume_point = tmp_path / "resume.safetensors"
    resume_point.touch()
    there_at_the_end: list[bool] = []
    original = JournalWriter.end

    def end(self: JournalWriter, *args: str) -> None:
        there_at_the_end.append(resume_point.exists())
        original(self, *args)

    monkeypatch.setattr(JournalWriter, "end", end)
    assert run_task(lambda *_: [resume_point, tmp_path / "never-there"]) == (0, "ok", "")
    assert there_at_the_end == [True]
    assert not resume_point.exists()


def test_the_command_itself(tmp_path: Path) -> None:
    """`python -m harness.worker FOLDER`, in a process of its own."""
    corpus = tmp_path / "text.txt"
    corpus.write_text("".join(f"{n} squared is {n * n}.\n" for n in range(300)))
    spec = SPEC.model_copy(update={"data": SPEC.data.model_copy(update={"corpus": str(corpus)})})
    folder = run_folder(tmp_path, spec)
    done = subprocess.run(
        [sys.executable, "-m", "harness.worker", str(folder)],
        capture_output=True,
        text=True,
        env={"SUITE_CACHE": str(tmp_path / "cache"), "PATH": "/usr/bin:/bin", "PYTHONPATH": str(Path.cwd())},
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert end_of(folder) == ("ok", "")
    records = read_journal(folder / "rank0.journal").records
    assert [record["s"] for record in records if record["k"] == "m" and "loss" in record["v"]] == [1, 2]
