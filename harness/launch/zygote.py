"""The process that imports torch once and forks one child a run.

    python -m harness.launch.zygote --socket FD --parent PID [--worker MODULE]

Started by `harness.launch.fork`, in a session of its own, with one end of a socket pair. Lines of JSON:
    in    {"id": 1, "run_dir": "...", "memory_bytes": null}      {"id": 1, "signal": 15}
    out   {"ready": true}    {"id": 1, "pid": 123}    {"id": 1, "code": 0}     (a negative code is a signal)
It never runs torch code itself, so no thread pool exists when it forks, and it sleeps between events.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

from harness.launch.child import die_with_parent, run_worker


class Zygote:
    """The loop: requests arrive on the socket, ends of children through SIGCHLD."""

    def __init__(self, connection: socket.socket, worker: str) -> None:
        self._connection = connection
        self._worker = worker
        self._received = b""
        self._pids: dict[int, int] = {}
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        os.set_blocking(self._wake_read, False)
        # A handler must exist for the number to reach the pipe; it has nothing to do.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)

    def serve(self) -> None:
        """Until the launcher closes its end of the socket."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._connection, selectors.EVENT_READ)
            selector.register(self._wake_read, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is self._connection:
                        if not self._read_requests():
                            return
                    else:
                        with suppress(BlockingIOError):
                            os.read(self._wake_read, 4096)
                self._report_ends()

    def send(self, message: dict[str, Any]) -> None:
        """One line to the launcher."""
        self._connection.sendall(json.dumps(message).encode() + b"\n")

    def _read_requests(self) -> bool:
        chunk = self._connection.recv(65536)
        if not chunk:
            return False
        *lines, self._received = (self._received + chunk).split(b"\n")
        for line in lines:
            request = json.loads(line)
            if "signal" in request:
                self._signal(request["id"], request["signal"])
            else:
                self._fork(request)
        return True

    def _signal(self, run: int, number: int) -> None:
        # Only children not yet reaped are known here, so the number cannot have passed on to a stranger.
        pid = self._pids.get(run)
        if pid is None:
            return
        try:
            os.killpg(pid, number)
        except ProcessLookupError:
            # Forked this instant: it has not opened its session yet.
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _fork(self, request: dict[str, Any]) -> None:
        zygote = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become_worker(request, zygote)
        self._pids[request["id"]] = pid
        self.send({"id": request["id"], "pid": pid})

    def _become_worker(self, request: dict[str, Any], zygote: int) -> None:
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            die_with_parent(zygote)
            self._connection.close()
            os.close(self._wake_read)
            os.close(self._wake_write)
            output = os.open(
                Path(request["run_dir"]) / "stderr.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644
            )
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.close(output)
            code = run_worker(Path(request["run_dir"]), request["memory_bytes"], self._worker)
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            # No clean-up inherited from the zygote may run twice, hence not sys.exit.
            with suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def _report_ends(self) -> None:
        for run, pid in list(self._pids.items()):
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                continue
            self._signal(run, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            del self._pids[run]
            self.send({"id": run, "code": os.waitstatus_to_exitcode(status)})


def main() -> None:
    """Entry: tie to the parent, import the worker, serve."""
    parser = argparse.ArgumentParser(description="Fork one process a run.")
    parser.add_argument("--socket", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--worker", required=True)
    arguments = parser.parse_args()
    die_with_parent(arguments.parent)
    zygote = Zygote(socket.socket(fileno=arguments.socket), arguments.worker)
    worker = importlib.import_module(arguments.worker)
    if hasattr(worker, "preload"):
        worker.preload()
    # Objects made so far are never collected in the children, so their pages stay shared.
    gc.collect()
    gc.freeze()
    zygote.send({"ready": True})
    with suppress(ConnectionError):
        zygote.serve()


if __name__ == "__main__":
    main()
