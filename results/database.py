"""Opening the database file: atomic creation, the wait for DuckDB's file lock, and plain errors.

DuckDB lets one process write or many read. A connection is therefore opened for one operation and closed
after it; whoever finds the file taken tries again, for `wait_s` seconds at most, and says once whom it
waits for.
"""

from __future__ import annotations

import contextlib
import importlib.resources
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

SCHEMA = "schema 1"
"""Comment on table `runs`; another one means the file was made by another version."""

_NOTICE_S = 0.5
Config = dict[str, str | bool | int | float | list[str]]
_CONFIG: Config = {"autoinstall_known_extensions": False, "autoload_known_extensions": False}
_LOCKED_DOWN: Config = {**_CONFIG, "enable_external_access": False, "lock_configuration": True}


class StoreError(Exception):
    """A results database that cannot be used as asked; the message says what to do."""


class NoDatabase(StoreError):  # noqa: N818
    """There is no database to read."""


class QueryError(StoreError):
    """SQL that DuckDB refuses; the message is DuckDB's."""


class DatabaseBusy(StoreError):  # noqa: N818
    """Another process kept the database for longer than the wait allowed."""


class Database:
    """One database file and the connection to it, if any is open just now."""

    def __init__(
        self, path: Path, *, read_only: bool, wait_s: float, on_wait: Callable[[str], None] | None
    ) -> None:
        self.path = path
        self.read_only = read_only
        self._wait_s = wait_s
        self._on_wait = on_wait
        self._guard = threading.RLock()
        self._connection: DuckDBPyConnection | None = None
        self._depth = 0
        self._schema_checked = False

    @contextlib.contextmanager
    def session(self) -> Iterator[DuckDBPyConnection]:
        """The connection; opened by the outermost `with`, closed when that one ends."""
        with self._guard:
            self._depth += 1
            try:
                if self._connection is None:
                    self._connection = self._open(self.read_only, _CONFIG)
                yield self._connection
            except Exception as error:
                unusable = _unusable(self.path, error)
                if unusable is None:
                    raise
                raise unusable from error
            finally:
                self._depth -= 1
                if self._depth == 0:
                    self.release()

    @contextlib.contextmanager
    def locked_down(self) -> Iterator[DuckDBPyConnection]:
        """A connection of its own that can neither write, nor reach other files, nor be told to."""
        with self._guard:
            # A process may hold a file in one configuration only; `session` opens it anew when next asked.
            self.release()
            connection = self._open(True, _LOCKED_DOWN)
            try:
                yield connection
            finally:
                connection.close()

    def release(self) -> None:
        """Close the connection, if one is open."""
        with self._guard:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def _open(self, read_only: bool, config: Config) -> DuckDBPyConnection:
        if not self.path.exists():
            if self.read_only or read_only:
                raise NoDatabase(f"there is no database {self.path}; `suite run CASE` makes one")
            _create(self.path)
        connection = self._connect(read_only, config)
        if not self._schema_checked:
            found = connection.execute(
                "SELECT comment FROM duckdb_tables() WHERE table_name = 'runs' AND schema_name = 'main'"
            ).fetchall()
            if found != [(SCHEMA,)]:
                connection.close()
                has = f"has {found[0][0]}" if found else "has no table of runs"
                raise StoreError(
                    f"{self.path} is not of this version: it {has}, not {SCHEMA}; "
                    "`suite export` it with the version that made it, then `suite merge` that folder"
                )
            self._schema_checked = True
        return connection

    def _connect(self, read_only: bool, config: Config) -> DuckDBPyConnection:
        import duckdb

        began = time.monotonic()
        pause = 0.01
        told = False
        while True:
            try:
                return duckdb.connect(str(self.path), read_only=read_only, config=config)
            except duckdb.Error as error:
                holder = _holder(str(error))
                if holder is None:
                    raise _unusable(self.path, error) or error from error
            waited = time.monotonic() - began
            if waited >= self._wait_s:
                raise DatabaseBusy(
                    f"{self.path} is in use by {holder}, after {waited:.0f} s still; try again when it ends"
                )
            if not told and waited >= min(_NOTICE_S, self._wait_s / 2) and self._on_wait is not None:
                self._on_wait(f"waiting for {self.path}: in use by {holder} (up to {self._wait_s:.0f} s)")
                told = True
            time.sleep(min(pause * random.uniform(0.5, 1.0), self._wait_s - waited))
            pause = min(pause * 1.5, 0.25)


def _unusable(path: Path, error: Exception) -> StoreError | None:
    """A plain error for a damaged file or a failing disk; None for what is not DuckDB's, or wrong SQL."""
    import duckdb

    wrong_sql = duckdb.ProgrammingError | duckdb.DataError | duckdb.IntegrityError | duckdb.NotSupportedError
    if not isinstance(error, duckdb.Error) or isinstance(error, wrong_sql):
        return None
    text = str(error).splitlines()[0]
    if "No space" in text or "too large" in text:
        return StoreError(f"cannot write {path}: {text}; with room again, `suite run` goes on where it was")
    return StoreError(
        f"cannot use {path}: {text}; if it is damaged, move it and its .wal away: "
        f"`suite ingest {path.parent}` makes it anew from the journals"
    )


def _holder(message: str) -> str | None:
    """Who holds the file, read from DuckDB's error; None where the error is another one."""
    if "Could not set lock" in message:
        match = re.search(r"PID (\d+)", message)
        return f"process {match[1]}" if match else "another process"
    if "different configuration" in message:
        return "another connection of this process"
    return None


def _create(path: Path) -> None:
    """Make the database beside its place, then link it in: it exists whole or not at all."""
    import duckdb

    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.new")
    new.unlink(missing_ok=True)
    schema = importlib.resources.files("results").joinpath("schema.sql").read_text("utf8")
    connection = duckdb.connect(str(new), config=_CONFIG)
    try:
        connection.execute(schema)
    finally:
        connection.close()
    try:
        os.link(new, path)
    except FileExistsError:
        pass  # another process was first
    except OSError:  # a file system without hard links
        new.rename(path)
    finally:
        new.unlink(missing_ok=True)
