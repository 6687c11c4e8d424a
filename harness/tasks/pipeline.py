"""A pipeline of stages that sleep: what the schedule itself costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness.spec import RunSpec
from results.journal import JournalWriter


def pipeline(spec: RunSpec, request: dict[str, Any], journal: JournalWriter, checkpoints: Path) -> list[Path]:
    raise NotImplementedError
