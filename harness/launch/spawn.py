"""Launcher that starts a fresh interpreter for each run: works everywhere, pays torch's import each time."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from harness.launch.base import WORKER, Exit, LaunchError, Request, python_command, worker_environment

POLL_S = 0.05
"""How often ends are looked for where the system has no pidfd."""


@dataclass
class _Child:
    process: subprocess.Popen[bytes]
    pidfd: int | None


class SpawnLauncher:
    """One `python -m harness.launch.child` a run, each in a session of its own."""

    mode = "spawn"

    def __init__(self, worker: str = WORKER) -> None:
        self._worker = worker
        self._children: dict[Path, _Child] = {}

    def start(self, request: Request) -> None:
        arguments = [str(request.run_dir), "--parent", str(os.getpid()), "--worker", self._worker]
        if request.memory_bytes is not None:
            arguments += ["--memory-bytes", str(request.memory_bytes)]
        with (request.run_dir / "stderr.txt").open("ab") as output:
            try:
                process = subprocess.Popen(
                    python_command("harness.launch.child", *arguments),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=worker_environment(),
                    start_new_session=True,
                )
            except OSError as error:
                raise LaunchError(f"cannot start a worker process: {error}") from error
        self._children[request.run_dir] = _Child(process, _open_pidfd(process.pid))

    def is_started(self, run_dir: Path) -> bool:
        return run_dir in self._children

    def wait(self, timeout_s: float) -> list[Exit]:
        deadline = time.monotonic() + timeout_s
        while True:
            exits = [self._reap(run_dir) for run_dir in list(self._children) if self._has_ended(run_dir)]
            left_s = deadline - time.monotonic()
            if exits or left_s <= 0:
                return exits
            self._sleep(left_s)

    def signal(self, run_dir: Path, number: int) -> None:
        child = self._children.get(run_dir)
        if child is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(child.process.pid, number)

    def close(self) -> None:
        for run_dir in list(self._children):
            self.signal(run_dir, signal.SIGKILL)
            self._reap(run_dir)

    def _has_ended(self, run_dir: Path) -> bool:
        process = self._children[run_dir].process
        if not hasattr(os, "waitid"):
            return process.poll() is not None
        # Looks without reaping: the group's number stays taken until its other members have been killed.
        return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _reap(self, run_dir: Path) -> Exit:
        child = self._children[run_dir]
        if hasattr(os, "waitid"):
            os.waitid(os.P_PID, child.process.pid, os.WEXITED | os.WNOWAIT)
        self.signal(run_dir, signal.SIGKILL)
        code = child.process.wait()
        if child.pidfd is not None:
            os.close(child.pidfd)
        del self._children[run_dir]
        return Exit(run_dir, code)

    def _sleep(self, left_s: float) -> None:
        fds = [child.pidfd for child in self._children.values() if child.pidfd is not None]
        if len(fds) == len(self._children):
            poll = select.poll()
            for fd in fds:
                poll.register(fd, select.POLLIN)
            poll.poll(left_s * 1000)
        else:
            time.sleep(min(POLL_S, left_s))


def _open_pidfd(pid: int) -> int | None:
    """A file descriptor that becomes readable when the process ends; None where there is no such thing."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None
