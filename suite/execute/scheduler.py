"""Run a plan: bases before what stands on them, several side by side, done ones skipped, dead ones resumed.

The rules:
- `ok`, `diverged` and `oom` answer a key's question and are kept (`retry` tries the latter two again); every
  other status is tried again by the next command, from its last checkpoint.
- A key is run under its lock. Two commands on one out folder share the work: what the other is running is
  waited for.
- A run whose process, or one of whose ranks, is killed from outside is tried once more by the same command.
- A run of several ranks takes a slot a rank; where those are not free it waits, and nothing that comes after it in the
  order overtakes it.
- A base that fails makes the runs that stand on it `skipped`, and the reason names it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.gemm.available import needs
from harness.launch import Exit, Launcher, Request, choose_mode, open_launcher
from harness.launch.base import WORKER
from suite.declare.meshes import not_carried_out
from suite.declare.plan import nvidia_visible
from suite.execute.events import Event, Finished, Message, Started
from suite.execute.folder import OutFolder, key_lock
from suite.execute.interrupts import StopRequest
from suite.execute.litter import InUse, sweep
from suite.execute.order import priorities
from suite.execute.outcome import FINAL, Ending, Outcome, explain, last_end
from suite.execute.request import AttemptRequest, build_request
from suite.execute.resources import choose_jobs, num_oom_kills, slots_of, visible_gpus
from suite.execute.watch import Watch

if TYPE_CHECKING:
    from results.records import RunRow
    from results.store import Store
    from suite.declare import Plan, PlannedRun

TICK_S = 0.2
"""How often limits, locks and stop requests are looked at."""


def execute(
    plan: Plan,
    out: Path,
    *,
    jobs: int | None = None,
    on_event: Callable[[Event], None] = lambda event: None,
    retry: bool = False,
    command: str | None = None,
    worker: str = WORKER,
    wait_s: float = 60.0,
) -> Outcome:
    """Run what is left of a plan and return what became of each run.

    `command` is stored with each run as what makes it again; `wait_s` bounds the wait for a database that
    another process is writing. Raises FolderError, LaunchError or the database's DatabaseBusy when the
    environment does not let runs start or be stored.
    """
    folder = OutFolder(out)
    folder.create()
    device = "cuda" if any(run.spec.device == "cuda" for run in plan.runs) else "cpu"
    mode, mode_reason = choose_mode(device)
    threads = max((run.spec.threads for run in plan.runs), default=1)
    num_jobs, jobs_reason = choose_jobs(jobs, device, threads)
    auto: dict[str, dict[str, Any]] = {
        "size": {"value": plan.size, "reason": plan.size_reason},
        "launch": {"value": mode, "reason": mode_reason},
        "jobs": {"value": num_jobs, "reason": jobs_reason},
    }
    database = _Database(folder, wait_s, on_event)
    work = _Work(
        plan, folder, database, open_launcher(mode, worker), on_event, num_jobs, retry,
        command or f"suite run {plan.case.path} --size {plan.size}", auto,
    )  # fmt: skip
    with StopRequest() as stop:
        return work.run(stop)


@dataclass(frozen=True)
class _Database:
    """Opens the database in passing: nobody keeps it open while runs are running."""

    out: OutFolder
    wait_s: float
    tell: Callable[[Event], None]

    def open(self) -> Store:
        from results.store import Store

        return Store(self.out.database, wait_s=self.wait_s, on_wait=lambda text: self.tell(Message(text)))


@dataclass(frozen=True)
class _Running:
    run: PlannedRun
    watch: Watch
    started: float
    oom_kills_before: int | None


class _Work:
    """The state of one execution; everything happens in the thread that calls `run`."""

    def __init__(
        self,
        plan: Plan,
        out: OutFolder,
        database: _Database,
        launcher: Launcher,
        tell: Callable[[Event], None],
        jobs: int,
        retry: bool,
        command: str,
        auto: dict[str, dict[str, Any]],
    ) -> None:
        self._plan, self._out, self._database, self._launcher = plan, out, database, launcher
        self._tell, self._jobs, self._retry, self._command, self._auto = tell, jobs, retry, command, auto
        cost = priorities(plan.runs)
        self._todo = sorted(plan.runs, key=lambda run: -cost[run.key])
        self._locks = {run.key: key_lock(out, run.key) for run in plan.runs}
        self._running: dict[Path, _Running] = {}
        self._statuses: dict[str, str] = {}
        self._known: dict[str, RunRow] = {}
        """What the database said of each key when this command last looked, to notice what others add."""
        self._ran: set[str] = set()
        self._killed: set[str] = set()
        self._told_waiting: set[str] = set()

    def run(self, stop: StopRequest) -> Outcome:
        """Until nothing is left to do or a stop is asked for."""
        with InUse(self._out) as use:
            self._read_database()
            if use.alone:
                sweep(self._out, self._database.open())
                use.share()
            num_done_before = len(self._statuses)
            try:
                while (self._todo or self._running) and stop.name is None:
                    self._start_ready()
                    if self._todo or self._running:
                        self._turn()
                if stop.name is not None:
                    self._stop_all(stop.name)
            finally:
                self._launcher.close()
                for lock in self._locks.values():
                    lock.release()
        num_failed = sum(status != "ok" for status in self._statuses.values())
        interrupted = stop.name is not None
        return Outcome(len(self._ran), num_done_before, num_failed, interrupted, dict(self._statuses))

    def _read_database(self) -> None:
        """Take in journals that dead commands left, then strike off what is done."""
        with self._database.open() as store:
            self._ingest_journals(store)
            self._known = store.status_of([run.key for run in self._plan.runs])
        for key, row in self._known.items():
            if row.status == "ok" or (row.status in FINAL and not self._retry):
                self._statuses[key] = row.status
        for run in reversed(self._plan.runs):
            if run.key not in self._statuses and run.depends_on is not None:
                self._check_base(run.depends_on)
        self._todo = [run for run in self._todo if run.key not in self._statuses]

    def _check_base(self, base: str) -> None:
        """A done base whose checkpoint is gone is trained again, since a run that is left needs it."""
        if self._statuses.get(base) != "ok":
            return
        sha256 = self._known[base].final_checkpoint
        if sha256 is None or not self._out.checkpoint(sha256).exists():
            del self._statuses[base]
            self._tell(
                Message(
                    f"{base} is done but its checkpoint is gone from {self._out.checkpoints}; training again"
                )
            )

    # Starting

    def _start_ready(self) -> None:
        for run in list(self._todo):
            if run.depends_on is not None and run.depends_on not in self._statuses:
                continue
            free = self._jobs - sum(self._slots(each.run) for each in self._running.values())
            if free == 0:
                return
            if self._locks[run.key].acquire():
                if self._slots(run) > free:
                    self._locks[run.key].release()
                    return
                self._todo.remove(run)
                if not self._start(run):
                    self._locks[run.key].release()
            elif run.key not in self._told_waiting:
                self._told_waiting.add(run.key)
                self._tell(
                    Message(f"{run.key} is being run by another command on {self._out.root}; waiting for it")
                )

    def _slots(self, run: PlannedRun) -> int:
        return slots_of(run.spec.num_ranks, run.spec.device, self._jobs)

    def _start(self, run: PlannedRun) -> bool:
        """Hand a run whose lock is held to the launcher; False when it needs no process."""
        known = self._known.get(run.key)
        reason = self._why_not(run)
        if reason is not None and known is not None and (known.status, known.reason) == ("skipped", reason):
            self._note(run, "skipped", reason)
            return False
        with self._database.open() as store:
            self._ingest_left_behind(store, run.key)
            row = store.status_of([run.key]).get(run.key)
            if row is not None and row != known and row.status not in ("interrupted", "skipped"):
                # Another command finished it since this one last looked.
                self._note(run, row.status, row.reason, peak_bytes=_peak_bytes(store, run.key))
                return False
            afresh = row is not None and row.status == "diverged"
            request = build_request(
                store, self._out, self._plan, run, command=self._command, auto=self._auto, afresh=afresh
            )
            if reason is None and run.depends_on is not None and request.content["start_checkpoint"] is None:
                reason = f"its base {run.depends_on} left no checkpoint in {self._out.checkpoints}"
            if reason is not None:
                store.skip(request.content, reason)
                self._note(run, "skipped", reason)
                return False
        self._launch(run, request)
        return True

    def _ingest_journals(self, store: Store) -> None:
        """What commands that were killed left behind, runs of other cases among it."""
        from results.ingest import BadRunFolder

        try:
            store.ingest_tree(self._out.journals)
        except BadRunFolder as error:
            self._tell(Message(str(error)))

    def _ingest_left_behind(self, store: Store, key: str) -> None:
        """Attempts newer than the database's: their command was killed while this one waited for the lock."""
        from results.ingest import BadRunFolder

        first_unknown = store.next_attempt(key)
        for attempt in self._out.attempts(key):
            if attempt >= first_unknown:
                reason = "the command that ran it was killed"
                # A folder whose command was killed before it wrote run.json holds nothing.
                with suppress(BadRunFolder):
                    store.ingest(self._out.run_dir(key, attempt), status="interrupted", reason=reason)

    def _why_not(self, run: PlannedRun) -> str | None:
        """Why a run cannot start; None when it can."""
        if run.depends_on is not None and self._statuses[run.depends_on] != "ok":
            return f"its base {run.depends_on} is {self._statuses[run.depends_on]}"
        if refused := not_carried_out(run.spec):
            return refused
        if run.spec.device == "cuda" and not nvidia_visible():
            need = needs(run.spec.gemm.kernel) if run.spec.task == "gemm" else None
            of_what = f" ({need})" if need is not None else ""
            return f"it needs an NVIDIA GPU{of_what}, and none is visible here"
        num_ranks = run.spec.num_ranks
        if run.spec.device == "cuda" and num_ranks > visible_gpus():
            return f"it needs {num_ranks} GPUs, one a rank; visible here: {visible_gpus()}"
        return None

    def _launch(self, run: PlannedRun, request: AttemptRequest) -> None:
        run_dir = self._out.run_dir(run.key, request.attempt)
        run_dir.mkdir(parents=True, exist_ok=True)
        # Renamed into place: run.json is whole or absent.
        (run_dir / "run.json.new").write_text(json.dumps(request.content, indent=1))
        (run_dir / "run.json.new").replace(run_dir / "run.json")
        watch = Watch(run_dir, run.spec.limits, self._launcher, run.spec.num_ranks)
        self._running[run_dir] = _Running(run, watch, time.monotonic(), num_oom_kills())
        # CUDA maps far more address space than it uses, so a limit on it would end every run.
        memory_bytes = run.spec.limits.memory_bytes if run.spec.device == "cpu" else None
        self._launcher.start(Request(run_dir, memory_bytes))
        self._ran.add(run.key)
        self._tell(
            Started(
                run.key,
                request.attempt,
                dict(run.labels),
                run.role,
                run_dir,
                run.spec.num_steps,
                request.resume_step,
            )
        )

    # While they run, and after

    def _turn(self) -> None:
        """Wait a tick for ends, settle them, and look at the limits of the others."""
        for exit in self._launcher.wait(TICK_S):
            self._settle(exit)
        for running in self._running.values():
            running.watch.look()

    def _settle(self, exit: Exit) -> None:
        """Store a run that ended; free its dependants, or put it back if it was killed from outside."""
        running = self._running.pop(exit.run_dir)
        run = running.run
        now, before = num_oom_kills(), running.oom_kills_before
        ending = explain(exit, running.watch.stopped, None if now is None or before is None else now - before)
        if ending.overrides or not _says_its_end(exit, run.spec.num_ranks, running.watch.stopped is not None):
            _record_end(exit.run_dir, ending)
        with self._database.open() as store:
            store.ingest(exit.run_dir, status=ending.status, reason=ending.reason)
            row = store.status_of([run.key])[run.key]
            self._known[run.key] = row
            # The journal's own word about its end, where there is one, is in the row and counts for more.
            if ending.try_again and row.reason == ending.reason and run.key not in self._killed:
                self._killed.add(run.key)
                self._todo.insert(0, run)
                self._tell(Message(f"{run.key}: {ending.reason}; trying once more"))
                return
            seconds = time.monotonic() - running.started
            self._note(run, row.status, row.reason, seconds, _peak_bytes(store, run.key))
        self._locks[run.key].release()

    def _note(
        self,
        run: PlannedRun,
        status: str,
        reason: str,
        seconds: float = 0.0,
        peak_bytes: float | None = None,
    ) -> None:
        """The run has its status: dependants may go, the display may show it."""
        self._statuses[run.key] = status
        index, total = len(self._statuses), len(self._plan.runs)
        self._tell(
            Finished(run.key, dict(run.labels), run.role, status, reason, seconds, peak_bytes, index, total)
        )

    def _stop_all(self, name: str) -> None:
        """End every running process and store what it had."""
        self._tell(Message(f"{name}: stopping {len(self._running)} runs and storing what they have"))
        for running in self._running.values():
            running.watch.stop("interrupted", f"stopped by {name}")
        while self._running:
            self._turn()


def _says_its_end(exit: Exit, num_ranks: int, stopped: bool) -> bool:
    """Whether a dead run's journal tells how it ended.

    A group's does when its agent came to its own end, and has written there; else it is the word of rank 0 alone.
    """
    if last_end(exit.run_dir) is None:
        return False
    return num_ranks == 1 or exit.code == 0 or (exit.code is not None and exit.code > 0 and not stopped)


def _record_end(run_dir: Path, ending: Ending) -> None:
    """Write into a dead run's journal how it ended: then the journals alone tell everything."""
    from results.journal import JournalWriter

    # On a full disk the database gets the ending from this command alone.
    with suppress(OSError):
        journal = JournalWriter(run_dir / "rank0.journal")
        journal.end(ending.status, ending.reason)
        journal.close()


def _peak_bytes(store: Store, key: str) -> float | None:
    """A run's measured peak over all categories of memory, where it was measured."""
    peaks = [value for _, _, scope, _, value in store.values([key], ["peak_bytes"]) if scope == "total"]
    return max(peaks, default=None)
