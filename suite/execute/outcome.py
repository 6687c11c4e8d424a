"""What an execution came to, and how a process's end becomes a status with a reason."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path

from harness.launch.base import EXIT_RANK_KILLED, EXIT_STATUS, SIGNALLED_FROM_OUTSIDE, Exit
from results.journal import read_journal

FINAL = frozenset({"ok", "diverged", "oom"})
"""Statuses that answer the question a key asks; the others are tried again by the next command."""


@dataclass(frozen=True)
class Outcome:
    """Counts over the plan's runs, and the status of each key."""

    num_ran: int
    num_done_before: int
    num_failed: int
    interrupted: bool
    statuses: dict[str, str]

    @property
    def exit_code(self) -> int:
        """0: all ok; 3: some run is not; 5: there was none; 130: interrupted."""
        if self.interrupted:
            return 130
        if not self.statuses:
            return 5
        return 3 if self.num_failed else 0


@dataclass(frozen=True)
class Ending:
    """Status and reason of a run whose journal has no word of its own about its end."""

    status: str
    reason: str
    try_again: bool = False
    """The process was killed from outside, which says nothing about the run."""
    overrides: bool = False
    """It knows more than what the run itself recorded last."""


def explain(exit: Exit, stopped: tuple[str, str] | None, num_oom_kills: int | None) -> Ending:
    """How a process ended, in a status and a sentence.

    `stopped` is (status, reason) when the suite itself ended the run; `num_oom_kills` is how many processes
    of this control group the kernel killed for memory while the run lived, None where that cannot be read.
    """
    if stopped is not None:
        return Ending(*stopped)
    if exit.code is None:
        return Ending("crashed", exit.reason, try_again=True)
    if exit.code == EXIT_RANK_KILLED:
        return _explain_killed_rank(exit.run_dir, num_oom_kills)
    if exit.code == EXIT_STATUS["oom"]:
        return Ending("oom", _with_last_line("out of memory", exit.run_dir))
    if exit.code == EXIT_STATUS["diverged"]:
        return Ending("diverged", "the worker's exit status says so")
    if exit.code == 0:
        return Ending("crashed", "the worker ended without saying how")
    if exit.code > 0:
        return Ending("crashed", _with_last_line(f"exit status {exit.code}", exit.run_dir))
    return _explain_signal(-exit.code, exit.run_dir, num_oom_kills)


def _explain_signal(number: int, run_dir: Path, num_oom_kills: int | None) -> Ending:
    if number == signal.SIGKILL and num_oom_kills:
        return Ending(
            "oom", "killed by the kernel's out-of-memory killer (memory.events of the control group)"
        )
    if number == signal.SIGKILL:
        return Ending(
            "crashed", "killed by signal 9 (often the kernel's out-of-memory killer)", try_again=True
        )
    name = signal.Signals(number).name if number in set(signal.Signals) else "unknown"
    reason = f"killed by signal {number} ({name})"
    if number in SIGNALLED_FROM_OUTSIDE:
        return Ending("crashed", reason, try_again=True)
    return Ending("crashed", _with_last_line(reason, run_dir))


def _explain_killed_rank(run_dir: Path, num_oom_kills: int | None) -> Ending:
    """One of several ranks was killed; which and when, the group has recorded."""
    end = last_end(run_dir)
    reason = end[1] if end is not None else "a rank was killed"
    if num_oom_kills:
        why = "the kernel's out-of-memory killer (memory.events of the control group)"
        return Ending("oom", f"{reason}, by {why}", overrides=True)
    return Ending("crashed", reason, try_again=True)


def last_end(run_dir: Path) -> tuple[str, str] | None:
    """(status, reason) of a run's outcome as its rank 0 journal has it last; None without one."""
    path = run_dir / "rank0.journal"
    records = read_journal(path).records if path.exists() else []
    ends = [(record["status"], record["reason"]) for record in records if record["k"] == "end"]
    return ends[-1] if ends else None


def _with_last_line(reason: str, run_dir: Path) -> str:
    """The reason, followed by the last line the worker printed, which is where Python names the exception."""
    try:
        text = (run_dir / "stderr.txt").read_bytes()[-4096:].decode(errors="replace")
    except OSError:
        return reason
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f"{reason}: {lines[-1][:300]}" if lines else reason
