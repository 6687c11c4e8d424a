"""One training step on tensors without data: its memory and its collectives, for any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness.spec import RunSpec
from results.journal import JournalWriter


def trace(spec: RunSpec, request: dict[str, Any], journal: JournalWriter, checkpoints: Path) -> list[Path]:
    raise NotImplementedError
