"""What `execute` tells while it works; a progress display is a function of these."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Started:
    """A run has been handed to the launcher."""

    key: str
    attempt: int
    labels: dict[str, Any]
    role: str
    run_dir: Path
    num_steps: int
    resume_step: int | None


@dataclass(frozen=True)
class Finished:
    """A run has its status, and its measurements are in the database."""

    key: str
    labels: dict[str, Any]
    role: str
    status: str
    reason: str
    seconds: float
    peak_bytes: float | None
    index: int
    """This run's place among those that have a status, counted from 1."""
    total: int


@dataclass(frozen=True)
class Message:
    """One sentence worth saying."""

    text: str


Event = Started | Finished | Message
