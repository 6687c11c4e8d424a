"""One real training step on real ranks: its memory and its collectives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness.spec import RunSpec
from results.journal import JournalWriter


def step(spec: RunSpec, request: dict[str, Any], journal: JournalWriter, checkpoints: Path) -> list[Path]:
    raise NotImplementedError
