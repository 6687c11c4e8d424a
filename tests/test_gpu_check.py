"""The script of the GPU checks, as far as a machine without a GPU can tell: its syntax, its steps, its answers."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "gpu_check.sh"
pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


def run(
    tmp_path: Path, *arguments: str, python: str = "exit 0", **environment: str
) -> subprocess.CompletedProcess[str]:
    """The script with a `python` that notes how it was called and then does as told."""
    fake = tmp_path / "python"
    fake.write_text(f'#!/bin/sh\necho "$@" >> "{tmp_path}/calls"\n{python}\n')
    fake.chmod(0o755)
    return subprocess.run(
        ["bash", str(SCRIPT), str(tmp_path / "out"), *arguments],
        env={**os.environ, "PYTHON": str(fake), **environment}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip


def calls(tmp_path: Path) -> list[str]:
    return (tmp_path / "calls").read_text().splitlines()


def test_its_syntax() -> None:
    assert subprocess.run(["bash", "-n", str(SCRIPT)]).returncode == 0


def test_an_unknown_step_names_those_there_are(tmp_path: Path) -> None:
    done = run(tmp_path, "sweeep")
    assert done.returncode == 2 and "native, sweep, ties" in done.stderr
    assert not (tmp_path / "calls").exists()


def test_precision_is_three_steps_in_order(tmp_path: Path) -> None:
    done = run(tmp_path, "precision")
    assert done.returncode == 0, done.stderr
    runs = [call for call in calls(tmp_path) if "scripts/native_check.py" in call or " run " in call]
    assert [call.split()[0 if "native" in call else 3] for call in runs] == [
        "scripts/native_check.py", "fp8_throughput", "flash_attention_bias",
    ]  # fmt: skip
    assert all("--size gpu" in call for call in runs[1:])


def test_memory_alone_is_what_it_does_unasked(tmp_path: Path) -> None:
    assert run(tmp_path).returncode == 0
    assert any("run fp8_long_horizon --size gpu" in call for call in calls(tmp_path))
    assert not any("fp8_throughput" in call for call in calls(tmp_path))


def test_the_worst_status_is_the_answer(tmp_path: Path) -> None:
    failing = 'case "$*" in *native_check*) exit 1;; *fp8_throughput*run*|*run*fp8_throughput*) exit 3;; esac'
    done = run(tmp_path, "precision", python=failing)
    assert done.returncode == 3
    assert any("flash_attention_bias" in call for call in calls(tmp_path))  # later steps still run


def test_without_time_left_a_step_is_said_to_be_missing(tmp_path: Path) -> None:
    done = run(tmp_path, "sweep", BUDGET="1")
    assert done.returncode == 4 and "no time left for" in done.stderr


def test_being_stopped_by_the_clock_is_no_failure(tmp_path: Path) -> None:
    slow = 'case "$*" in *run*fp8_throughput*) exec sleep 30;; esac'
    done = run(tmp_path, "sweep", python=slow, BUDGET="6")
    assert done.returncode == 0 and "stopped after" in done.stderr


def test_fit_counts_first_and_then_measures_one_step_at_a_time(tmp_path: Path) -> None:
    assert run(tmp_path, "fit").returncode == 0
    made = [call for call in calls(tmp_path) if " run fit_on_one_gpu" in call]
    assert len(made) == 2 and all("--size gpu" in call for call in made)
    assert "--only task=ledger --only task=trace" in made[0] and "--jobs 1" in made[1]
    assert any("query" in call for call in calls(tmp_path))
