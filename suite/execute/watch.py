"""Limits of one running process or group, watched from outside: wall time, and signs of life in its ranks' journals."""

from __future__ import annotations

import signal
import time
from pathlib import Path

from harness.launch.base import Launcher
from harness.launch.culprit import explain_silence
from harness.spec import LimitsSpec

GRACE_S = 3.0
"""Seconds between asking a process to end and killing it."""

START_UP_S = 60.0
"""Allowed on top of the hang limit until the first sign of life: a busy machine imports torch slowly."""


class Watch:
    """Decides when a run has gone too far, and ends it: SIGTERM, then SIGKILL after a grace.

    Times are monotonic, and only changes of a journal's time stamp count, so that neither a suspended
    machine nor a file server's clock makes a run look hung. Of several ranks, one that is silent too long is enough.
    """

    def __init__(self, run_dir: Path, limits: LimitsSpec, launcher: Launcher, num_ranks: int = 1) -> None:
        self._run_dir = run_dir
        self._limits = limits
        self._launcher = launcher
        self._seen: dict[int, tuple[tuple[int, int] | None, float]] = dict.fromkeys(
            range(num_ranks), (None, 0.0)
        )
        """Rank -> its journal's time and size when they last changed, and when that was seen."""
        self._started: float | None = None
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
            self._started = now
            self._seen = dict.fromkeys(self._seen, (None, now))
        if now - self._started > self._limits.time_s:
            self.stop("timeout", f"still running after {self._limits.time_s:g} s (limits.time_s)")
            return
        self._look_for_life(now)

    def _look_for_life(self, now: float) -> None:
        for rank, (seen, seen_at) in self._seen.items():
            try:
                stat = (self._run_dir / f"rank{rank}.journal").stat()
            except OSError:
                allowed_s = self._limits.hang_s + START_UP_S
            else:
                allowed_s = self._limits.hang_s
                if (stat.st_mtime_ns, stat.st_size) != seen:
                    self._seen[rank] = (stat.st_mtime_ns, stat.st_size), now
                    continue
            if now - seen_at > allowed_s:
                self.stop("hung", self._describe_silence(now - seen_at))
                return

    def _describe_silence(self, silent_s: float) -> str:
        reason = f"no sign of life for {silent_s:.0f} s (limits.hang_s is {self._limits.hang_s:g})"
        culprit = explain_silence(self._run_dir) if len(self._seen) > 1 else ""
        return f"{culprit}; {reason}" if culprit else reason

    def stop(self, status: str, reason: str) -> None:
        """End the run for this reason; only the first reason counts."""
        if self.stopped is None:
            self.stopped = (status, reason)
            self._kill_at = time.monotonic() + GRACE_S
            self._launcher.signal(self._run_dir, signal.SIGTERM)
