"""Run folders as a worker leaves them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from results.journal import JournalWriter
from results.store import Store

ENVIRONMENT = {"hostname": "node1", "machine": "Test 2 cores", "packages": {"torch": "2.13.0"}}


class RunFolder:
    """One attempt on disk; `writer` records to it."""

    def __init__(self, journals: Path, key: str, attempt: int = 1, **request: Any) -> None:
        self.path = journals / key / str(attempt)
        self.path.mkdir(parents=True)
        self.journal = self.path / "rank0.journal"
        self.request = {
            "run_id": f"{key}.{attempt}",
            "key": key,
            "attempt": attempt,
            "case": "a_case",
            "size": "laptop",
            "role": "arm",
            "labels": {"precision": "bf16", "seed": 0},
            "spec": {"task": "pretrain", "device": "cpu", "precision": {"name": "bf16", "recipe": None}},
            "start_checkpoint": None,
            "resume_checkpoint": None,
            "command": "suite run a_case",
            "suite_version": "0.1.0",
            "auto": {"jobs": {"value": 2, "reason": "2 cores"}},
        } | request
        (self.path / "run.json").write_text(json.dumps(self.request))
        self.writer = JournalWriter(self.journal)

    def train(self, steps: range, *, status: str | None = "ok", offset: float = 0.0) -> RunFolder:
        """A whole journal: start, a loss a step of 1 / step + offset, and, with a status, the end."""
        self.writer.start(ENVIRONMENT)
        for step in steps:
            self.writer.measure(step, {"loss": 1 / step + offset, "learning_rate": 1e-3})
        if status is not None:
            self.writer.end(status)
        return self


@pytest.fixture
def run_folder(tmp_path: Path) -> Callable[..., RunFolder]:
    """Makes run folders below tmp_path/journals."""

    def make(
        key: str = "k1", attempt: int = 1, *, where: Path = tmp_path / "journals", **request: Any
    ) -> RunFolder:
        return RunFolder(where, key, attempt, **request)

    return make


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "suite.duckdb")
