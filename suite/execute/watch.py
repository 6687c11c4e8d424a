"""Limits of one running process, watched from outside: wall time, and signs of life in its journal."""

from __future__ import annotations

import signal
import time
from pathlib import Path

from harness.launch.base import Launcher
from harness.spec import LimitsSpec

GRACE_S = 3.0
"""Seconds between asking a process to end and killing it."""

START_UP_S = 60.0
"""Allowed on top of the hang limit until the first sign of life: a busy machine imports torch slowly."""


class Watch:
    """Decides when a run has gone too far, and ends it: SIGTERM, then SIGKILL after a grace.

    Times are monotonic, and only changes of the journal's time stamp count, so that neither a suspended
    machine nor a file server's clock makes a run look hung.
    """

    def __init__(self, run_dir: Path, limits: LimitsSpec, launcher: Launcher) -> None:
        self._run_dir = run_dir
        self._limits = limits
        self._launcher = launcher
        self._journal = run_dir / "rank0.journal"
        self._started: float | None = None
        self._seen: tuple[int, int] | None = None
        self._seen_at = 0.0
        self._kill_at: float | None = None
        self.stopped: tuple[str, str] | None = None
        """Status and reason, once the suite has decided to end the run."""

    def look(self) -> None:
        """Check the limits now, and end the run or finish ending it."""
        now = time.monotonic()
        if self._kill_at is not None:
            if now >= self._kill_at:
                self._launcher.signal(self._run_dir, signal.SIGKILL)
                self._kill_at = now + GRACE_S
            return
        if self._started is None:
            if not self._launcher.is_started(self._run_dir):
                return
            self._started = self._seen_at = now
        if now - self._started > self._limits.time_s:
            self.stop("timeout", f"still running after {self._limits.time_s:g} s (limits.time_s)")
            return
        self._look_for_life(now)

    def _look_for_life(self, now: float) -> None:
        try:
            stat = self._journal.stat()
        except OSError:
            allowed_s = self._limits.hang_s + START_UP_S
        else:
            allowed_s = self._limits.hang_s
            if (stat.st_mtime_ns, stat.st_size) != self._seen:
                self._seen, self._seen_at = (stat.st_mtime_ns, stat.st_size), now
        silent_s = now - self._seen_at
        if silent_s > allowed_s:
            self.stop(
                "hung", f"no sign of life for {silent_s:.0f} s (limits.hang_s is {self._limits.hang_s:g})"
            )

    def stop(self, status: str, reason: str) -> None:
        """End the run for this reason; only the first reason counts."""
        if self.stopped is None:
            self.stopped = (status, reason)
            self._kill_at = time.monotonic() + GRACE_S
            self._launcher.signal(self._run_dir, signal.SIGTERM)
