"""A tree of run folders, `journals/KEY/ATTEMPT`: which of them the database has not seen whole."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from results.ingest import BadRunFolder, journal_sizes, started_at
from results.journal import read_journal

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

Known = Mapping[tuple[str, datetime], dict[int, int]]

_HEAD_BYTES = 65536
"""More than a start record takes."""


def last_attempt(key_dir: Path) -> int:
    """The highest attempt with a folder; 0 without any."""
    if not key_dir.is_dir():
        return 0
    return max((int(path.name) for path in key_dir.iterdir() if path.name.isdigit()), default=0)


def is_locked(key_dir: Path) -> bool:
    """True while a process holds the lock of the key, that is, runs it."""
    try:
        with (key_dir / "lock").open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def known_bytes(connection: DuckDBPyConnection) -> Known:
    """(key, start time) -> bytes ingested per rank, of every run that has started."""
    rows = connection.execute(
        "SELECT key, started_at, journal_bytes FROM runs WHERE started_at IS NOT NULL"
    ).fetchall()
    return {(key, at): {int(rank): n for rank, n in json.loads(sizes).items()} for key, at, sizes in rows}


def new_folders(journals: Path, known: Known, skip_locked: bool) -> Iterator[Path]:
    """Run folders with something that the database may lack, by key and attempt; none where nothing ran."""
    if not journals.is_dir():
        return
    for key_dir in sorted(path for path in journals.iterdir() if path.is_dir()):
        for run_dir in sorted(
            (path for path in key_dir.iterdir() if path.name.isdigit()), key=lambda path: int(path.name)
        ):
            sizes = journal_sizes(run_dir)
            rank0 = run_dir / "rank0.journal"
            if sizes.get(0):
                with rank0.open("rb") as file:
                    began = started_at(file.read(_HEAD_BYTES))
                if began is not None and known.get((key_dir.name, began)) == sizes:
                    continue
            if skip_locked and is_locked(key_dir) and not _has_ended(rank0):
                continue
            if sizes or (run_dir / "run.json").exists():
                yield run_dir


def ingest_folders(folders: Iterable[Path], ingest: Callable[[Path], bool]) -> int:
    """Ingest each; the number that brought something new. One bad folder does not keep the others out."""
    num_new = 0
    bad: list[str] = []
    for run_dir in folders:
        try:
            num_new += ingest(run_dir)
        except BadRunFolder as error:
            bad.append(str(error))
    if bad:
        raise BadRunFolder("\n".join(bad))
    return num_new


def _has_ended(rank0: Path) -> bool:
    if not rank0.exists():
        return False
    records = read_journal(rank0).records
    return bool(records) and records[-1]["k"] == "end"
