"""The real command in processes of its own, and what it leaves in its out folder."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from results.journal import read_journal
from results.store import Store

MARK = "SUITE_TEST_MARK"
COMMAND_S = 120.0
"""Far more than any command here takes; reached only by one that hangs."""


def until(condition: Callable[[], bool], what: str, limit_s: float = 30.0) -> None:
    """Wait for a condition; fail when it does not come true."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.01)


@dataclass(frozen=True)
class Process:
    """A process of the command under test."""

    pid: int
    parent: int


@dataclass
class Ended:
    """What a command answered."""

    code: int
    stdout: str
    stderr: str
    seconds: float


@dataclass
class Command:
    """A `suite` command that runs."""

    popen: subprocess.Popen[bytes]
    stdout: Path
    stderr: Path
    started: float = field(default_factory=time.monotonic)

    def wait(self) -> Ended:
        """Until it ends; fails if that takes unreasonably long, or if it shows a traceback."""
        code = self.popen.wait(COMMAND_S)
        ended = Ended(code, self.stdout.read_text(), self.stderr.read_text(), time.monotonic() - self.started)
        assert "Traceback" not in ended.stderr, ended.stderr
        return ended


class Bench:
    """A folder with a case in it, commands run there, and everything alive that they started."""

    def __init__(self, folder: Path, case: str) -> None:
        self.folder = folder
        self.case = folder / "case.yaml"
        self.case.write_text(case)
        # Forked workers have the command line of what forked them; the environment is each process's own.
        self._mark = uuid.uuid4().hex
        self._num_commands = 0

    def start(self, *arguments: str | Path, out: str = "out") -> Command:
        """Start `suite ARGUMENTS --out OUT`."""
        self._num_commands += 1
        stdout, stderr = (self.folder / f"{self._num_commands}.{name}" for name in ("stdout", "stderr"))
        with stdout.open("wb") as to_stdout, stderr.open("wb") as to_stderr:
            popen = subprocess.Popen(
                [sys.executable, "-m", "suite", *map(str, arguments), "--out", out],
                cwd=self.folder,
                stdout=to_stdout,
                stderr=to_stderr,
                stdin=subprocess.DEVNULL,
                env={**os.environ, MARK: self._mark, "PYTHONPATH": str(Path(__file__).parents[2])},
            )
        return Command(popen, stdout, stderr)

    def run(self, *arguments: str | Path, out: str = "out") -> Ended:
        """Run `suite ARGUMENTS --out OUT` to its end."""
        return self.start(*arguments, out=out).wait()

    def store(self, out: str = "out") -> Store:
        return Store(self.folder / out / "suite.duckdb", read_only=True)

    def processes(self) -> list[Process]:
        """Everything alive that a command of this bench started, workers and zygotes included."""
        found = []
        for folder in Path("/proc").iterdir():
            # A process may end while it is looked at.
            with suppress(OSError, IndexError):
                if f"{MARK}={self._mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                    state, parent = (folder / "stat").read_text().rsplit(")", 1)[1].split()[:2]
                    if state != "Z":
                        found.append(Process(int(folder.name), int(parent)))
        return found

    def workers(self, command: Command) -> list[int]:
        """Processes in which runs of this command train: children of its zygote."""
        parents = {process.pid: process.parent for process in self.processes()}
        return [pid for pid, parent in parents.items() if parents.get(parent) == command.popen.pid]

    def assert_no_orphan(self) -> None:
        """Nothing that was started lives on (the kernel needs a moment to carry a death downwards)."""
        until(lambda: not self.processes(), "no process is left", 5.0)


def measurements(store: Store) -> set[tuple[Any, ...]]:
    """Every row, its value as text: exact, and NaN equals NaN. Fails where a row is there twice."""
    _, rows = store.query("SELECT run_id, rank, step, metric, scope, value FROM measurements")
    points = [row[:-1] for row in rows]
    assert len(points) == len(set(points)), "something was ingested twice"
    return {(*row[:-1], repr(row[-1])) for row in rows}


def recorded(out: Path) -> set[tuple[Any, ...]]:
    """The same, from the journals on disk."""
    found = set()
    for path in out.glob("journals/*/*/rank0.journal"):
        run_id = f"{path.parents[1].name}.{path.parent.name}"
        for record in read_journal(path).records:
            if record["k"] == "m":
                for name, value in record["v"].items():
                    value = None if value is None else float(value)
                    found.add((run_id, 0, record["s"], name, record.get("c", ""), repr(value)))
    return found
