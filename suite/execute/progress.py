"""Showing an execution to a person: one line a finished run on a plain terminal, a live table on a tty.

Everything goes to stderr; stdout belongs to data.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from suite.execute.events import Event, Finished, Message, Started

if TYPE_CHECKING:
    from rich.table import Table

TAIL_BYTES = 4096


def describe_labels(labels: Mapping[str, Any], role: str) -> str:
    """`precision=bf16 seed=0`, or the word base for a run that others start from."""
    text = " ".join(f"{name}={value}" for name, value in labels.items())
    return text or role


def describe_bytes(num_bytes: float | None) -> str:
    """In MiB, or - where it was not measured."""
    return "-" if num_bytes is None else f"{num_bytes / 2**20:,.0f} MiB"


def finished_line(event: Finished) -> str:
    """`[12/48] KEY ok 12.3 s 90 MiB precision=bf16 seed=0`, with the reason where the run is not ok."""
    width = len(str(event.total))
    line = (
        f"[{event.index:>{width}}/{event.total}] {event.key} {event.status:<4} {event.seconds:6.1f} s "
        f"{describe_bytes(event.peak_bytes):>9}  {describe_labels(event.labels, event.role)}"
    )
    return line if event.status == "ok" else f"{line}  ({event.reason})"


def last_step(journal: Path) -> int | None:
    """The newest training step in the last few kilobytes of a journal that is being written."""
    try:
        with journal.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - TAIL_BYTES))
            lines = file.read().split(b"\n")
    except OSError:
        return None
    for line in reversed(lines):
        try:
            record = json.loads(line.split(b" ", 2)[2])
        except (IndexError, ValueError):
            continue
        if isinstance(record, dict) and record.get("k") == "m" and isinstance(record.get("s"), int):
            return int(record["s"])
    return None


class LiveTable:
    """The runs in progress, redrawn by rich a few times a second from their journals."""

    def __init__(self) -> None:
        self._running: dict[str, tuple[Started, float]] = {}
        self._title = "starting"

    def update(self, event: Event) -> None:
        """Take in an event; called from the execution's thread."""
        if isinstance(event, Started):
            self._running = {**self._running, event.key: (event, time.monotonic())}
        elif isinstance(event, Finished):
            self._running = {key: value for key, value in self._running.items() if key != event.key}
            self._title = f"{event.index} of {event.total} runs have their status"

    def __rich__(self) -> Table:
        from rich.table import Table

        table = Table(title=self._title, title_justify="left", box=None, padding=(0, 2, 0, 0))
        for name in ("running", "step", "of", "time", "labels") if self._running else ():
            table.add_column(name, justify="right" if name in ("step", "of", "time") else "left")
        for event, since in self._running.values():
            step = last_step(event.run_dir / "rank0.journal")
            table.add_row(
                event.key,
                "starting" if step is None else str(step),
                str(event.num_steps),
                f"{time.monotonic() - since:.0f} s",
                describe_labels(event.labels, event.role),
            )
        return table


@contextmanager
def show_progress() -> Iterator[Callable[[Event], None]]:
    """A function to hand to `execute`, for the terminal at hand."""
    if not sys.stderr.isatty():
        yield _plain
        return
    from rich.console import Console
    from rich.live import Live

    console = Console(stderr=True)
    table = LiveTable()

    def tell(event: Event) -> None:
        table.update(event)
        if isinstance(event, Finished):
            style = "green" if event.status == "ok" else "red"
            console.print(finished_line(event), style=style, markup=False, highlight=False, soft_wrap=True)
        elif isinstance(event, Message):
            console.print(event.text, style="yellow", markup=False, highlight=False, soft_wrap=True)

    with Live(table, console=console, refresh_per_second=4, transient=True):
        yield tell


def _plain(event: Event) -> None:
    if isinstance(event, Finished):
        print(finished_line(event), file=sys.stderr, flush=True)
    elif isinstance(event, Message):
        print(event.text, file=sys.stderr, flush=True)
