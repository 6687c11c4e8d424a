"""The fake worker must be importable by the processes that the launchers start."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def fake_worker_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


@pytest.fixture
def make_run_dir(tmp_path: Path) -> Callable[..., Path]:
    (tmp_path / "checkpoints").mkdir()

    def make(key: str, tokens: int = 2, **labels: Any) -> Path:
        run_dir = tmp_path / "journals" / key / "1"
        run_dir.mkdir(parents=True)
        spec = {"tokens": tokens, "batch_size": 1, "seq_len": 1, "seed": 0}
        request = {"key": key, "attempt": 1, "labels": labels, "spec": spec, "resume_checkpoint": None}
        (run_dir / "run.json").write_text(json.dumps(request))
        return run_dir

    return make
