"""Launcher that asks a zygote, which has torch loaded, to fork each run: milliseconds instead of seconds."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from harness.launch.base import WORKER, Exit, LaunchError, Request, python_command, worker_environment

END_S = 5.0
"""Seconds a zygote that closed its socket gets to end by itself."""


@dataclass
class _Zygote:
    process: subprocess.Popen[bytes]
    connection: socket.socket
    errors: IO[bytes]
    ready: bool = False
    received: bytes = b""
    runs: dict[int, Path] = field(default_factory=dict)
    started: set[int] = field(default_factory=set)


class ForkLauncher:
    """Talks to `harness.launch.zygote`, which is started with the first run and again should it die."""

    mode = "fork"

    def __init__(self, worker: str = WORKER) -> None:
        self._worker = worker
        self._zygote: _Zygote | None = None
        self._num_requests = 0

    def start(self, request: Request) -> None:
        if self._zygote is None:
            self._zygote = self._start_zygote()
        self._num_requests += 1
        self._zygote.runs[self._num_requests] = request.run_dir
        # A zygote that died just now is noticed by `wait`, which then reports this run as well.
        with suppress(ConnectionError):
            self._send(
                {
                    "id": self._num_requests,
                    "run_dir": str(request.run_dir),
                    "memory_bytes": request.memory_bytes,
                }
            )

    def is_started(self, run_dir: Path) -> bool:
        run = self._id_of(run_dir)
        return self._zygote is not None and run in self._zygote.started

    def wait(self, timeout_s: float) -> list[Exit]:
        deadline = time.monotonic() + timeout_s
        exits: list[Exit] = []
        while not exits:
            left_s = max(0.0, deadline - time.monotonic())
            if self._zygote is None:
                time.sleep(left_s)
                return exits
            poll = select.poll()
            poll.register(self._zygote.connection, select.POLLIN)
            if not poll.poll(left_s * 1000):
                return exits
            exits = self._read(self._zygote)
        return exits

    def signal(self, run_dir: Path, number: int) -> None:
        run = self._id_of(run_dir)
        if run is not None:
            with suppress(ConnectionError):
                self._send({"id": run, "signal": int(number)})

    def close(self) -> None:
        if self._zygote is not None:
            # Its children die with it, by the kernel's hand.
            self._zygote.process.kill()
            self._zygote.errors.close()
            self._bury(self._zygote)

    def _start_zygote(self) -> _Zygote:
        ours, theirs = socket.socketpair()
        errors = tempfile.TemporaryFile()  # noqa: SIM115 (read and closed when the zygote ends)
        arguments = ["--socket", str(theirs.fileno()), "--parent", str(os.getpid()), "--worker", self._worker]
        try:
            process = subprocess.Popen(
                python_command("harness.launch.zygote", *arguments),
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                env=worker_environment(),
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        except OSError as error:
            raise LaunchError(f"cannot start a worker process: {error}") from error
        theirs.close()
        return _Zygote(process, ours, errors)

    def _id_of(self, run_dir: Path) -> int | None:
        runs = self._zygote.runs if self._zygote else {}
        return next((run for run, folder in runs.items() if folder == run_dir), None)

    def _send(self, message: dict[str, Any]) -> None:
        if self._zygote is not None:
            self._zygote.connection.sendall(json.dumps(message).encode() + b"\n")

    def _read(self, zygote: _Zygote) -> list[Exit]:
        try:
            chunk = zygote.connection.recv(65536)
        except ConnectionError:
            chunk = b""
        if not chunk:
            return self._lost(zygote)
        exits = []
        *lines, zygote.received = (zygote.received + chunk).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "ready" in message:
                zygote.ready = True
            elif "pid" in message:
                zygote.started.add(message["id"])
            else:
                zygote.started.discard(message["id"])
                exits.append(Exit(zygote.runs.pop(message["id"]), message["code"]))
        return exits

    def _lost(self, zygote: _Zygote) -> list[Exit]:
        """The zygote died: every run it had is lost; the next start makes a new one."""
        code = self._bury(zygote)
        how = f"killed by signal {-code}" if code < 0 else f"exit status {code}"
        if not zygote.ready and code >= 0:
            zygote.errors.seek(0)
            last = zygote.errors.read().decode(errors="replace").strip().splitlines()
            zygote.errors.close()
            raise LaunchError(f"the worker could not be loaded ({how}): {last[-1] if last else 'no message'}")
        zygote.errors.close()
        reason = f"the process that forks the workers died ({how}) and took this run along"
        return [Exit(run_dir, None, reason) for run_dir in zygote.runs.values()]

    def _bury(self, zygote: _Zygote) -> int:
        self._zygote = None
        zygote.connection.close()
        try:
            # Its end of the socket closes a little before it ends; killed in between, it could not say why.
            return zygote.process.wait(END_S)
        except subprocess.TimeoutExpired:
            zygote.process.kill()
            return zygote.process.wait()
