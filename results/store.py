"""The results database as the rest of the suite sees it.

A `Store` opens the file for each operation and closes it again, so that several commands can work on one
database; inside `with Store(path) as store:` the connection is kept until the block ends: right for many
reads in a row, wrong around anything slow, since others wait meanwhile.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from results import tree, verdicts
from results.database import Database, QueryError
from results.exchange.benchmarks import ingest_session
from results.exchange.export import export_tables
from results.exchange.merge import MergeResult, merge_parquet
from results.ingest import ingest_run
from results.records import STATUSES, RunRow
from results.rows import select_dicts, select_runs, skip_run

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection


class Store:
    """One results database. Threads may share it; they take turns."""

    def __init__(
        self,
        path: Path,
        *,
        read_only: bool = False,
        wait_s: float = 60.0,
        on_wait: Callable[[str], None] | None = None,
    ) -> None:
        """`on_wait` is told once per wait who holds the file; after `wait_s` seconds DatabaseBusy is raised.

        A store that may write makes a missing database on first use; a read-only one raises NoDatabase.
        """
        self.path = Path(path)
        self._wait_s, self._on_wait = wait_s, on_wait
        self._database = Database(self.path, read_only=read_only, wait_s=wait_s, on_wait=on_wait)
        self._held: list[contextlib.AbstractContextManager[Any]] = []

    def __enter__(self) -> Store:
        session = self._database.session()
        session.__enter__()
        self._held.append(session)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._held.pop().__exit__(None, None, None)

    # Writing

    def ingest(self, run_dir: Path, *, status: str | None = None, reason: str | None = None) -> bool:
        """Take in what a run's journals have beyond what is stored; False if that is nothing.

        `status` and `reason` count where the journals have no `end` record; without them such a run is
        `interrupted`. Raises BadRunFolder.
        """
        if status is not None and status not in STATUSES:
            raise ValueError(f"status {status!r} is not one of {', '.join(STATUSES)}")
        with self._transaction() as connection:
            return ingest_run(connection, run_dir, status=status, reason=reason)

    def ingest_tree(self, journals: Path, *, skip_locked: bool = True) -> int:
        """Ingest every run folder (KEY/ATTEMPT) below `journals`; the number that brought something new.

        A run without an `end` record becomes `interrupted`; `skip_locked` leaves it alone while a process
        holds its key's lock. Raises BadRunFolder for folders with journals but no readable request, when all
        others are in.
        """
        with self._database.session() as connection:
            known = tree.known_bytes(connection)
        return tree.ingest_folders(tree.new_folders(journals, known, skip_locked), self.ingest)

    def ingest_benchmarks(self, path: Path) -> bool:
        """Take in a file of pytest-benchmark; False if it is in already. Raises BadBenchmarks."""
        with self._transaction() as connection:
            return ingest_session(connection, path)

    def skip(self, request: Mapping[str, Any], reason: str) -> None:
        """Record a run that could not start; `request` as in run.json. It replaces an earlier such record."""
        with self._transaction() as connection:
            skip_run(connection, request, reason)

    def save_verdicts(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Store verdicts in place of all those of the same (case_name, size, machine)."""
        with self._transaction() as connection:
            verdicts.save(connection, rows)

    def merge(self, other: Path) -> MergeResult:
        """Bring in another database file or a folder of exported Parquet; doing it again changes nothing.

        A run_id that both have for different runs stays ours; theirs gets the next free attempt of its key.
        """
        with tempfile.TemporaryDirectory(prefix="suite-merge-") as scratch:
            folder = other
            if not other.is_dir():
                folder = Path(scratch)
                Store(other, read_only=True, wait_s=self._wait_s, on_wait=self._on_wait).export(
                    folder, "parquet"
                )
            with self._transaction() as connection:
                return merge_parquet(connection, folder)

    # Reading

    def runs(self, *, keys: Iterable[str] | None = None, case: str | None = None) -> list[RunRow]:
        """The attempt that counts of each run, in order of key; only those of `keys` and `case` if given."""
        source, params = "latest_runs WHERE TRUE", list[Any]()
        if keys is not None:
            source += " AND list_contains(?::TEXT[], key)"
            params.append(list(keys))
        if case is not None:
            source += " AND case_name = ?"
            params.append(case)
        with self._database.session() as connection:
            return [RunRow(**row) for row in select_runs(connection, source, params)]

    def status_of(self, keys: Iterable[str]) -> dict[str, RunRow]:
        """key -> the attempt that counts; keys that were never run are absent."""
        return {row.key: row for row in self.runs(keys=keys)}

    def curve(self, key: str, metric: str, scope: str = "", *, rank: int = 0) -> list[tuple[int, float]]:
        """(step, value) in order of step, resumed attempts joined; missing values left out."""
        return self.curves([key], metric, scope, rank=rank).get(key, [])

    def curves(
        self, keys: Iterable[str], metric: str, scope: str | None = "", *, rank: int = 0
    ) -> dict[str, list[tuple[int, float]]]:
        """Curves of many runs, by one query; keys without the metric are absent. `scope` None: all scopes."""
        found: dict[str, list[tuple[int, float]]] = {}
        for key, step, value in self._fetch(
            "SELECT key, step, value FROM curves WHERE list_contains($keys::TEXT[], key) "
            "AND metric = $metric AND ($scope::TEXT IS NULL OR scope = $scope) AND rank = $rank "
            "AND value IS NOT NULL ORDER BY key, step, scope",
            {"keys": list(keys), "metric": metric, "scope": scope, "rank": rank},
        ):
            found.setdefault(key, []).append((step, value))
        return found

    def values(
        self, keys: Iterable[str], metrics: Iterable[str], *, rank: int = 0
    ) -> list[tuple[str, str, str, int, float]]:
        """(key, metric, scope, step, value) of many runs, in that order; missing values left out."""
        return self._fetch(
            "SELECT key, metric, scope, step, value FROM curves WHERE list_contains($keys::TEXT[], key) "
            "AND list_contains($metrics::TEXT[], metric) AND rank = $rank AND value IS NOT NULL ORDER BY ALL",
            {"keys": list(keys), "metrics": list(metrics), "rank": rank},
        )

    def environment(self, environment_id: str) -> dict[str, Any] | None:
        """The columns of an environment, `packages` and `details` as dicts."""
        with self._database.session() as connection:
            rows = select_dicts(
                connection, "SELECT * FROM environments WHERE environment_id = ?", [environment_id]
            )
        return (
            {**rows[0], **{name: json.loads(rows[0][name]) for name in ("packages", "details")}}
            if rows
            else None
        )

    def next_attempt(self, key: str, journals: Path | None = None) -> int:
        """The number of a new attempt of `key`: above all stored ones and all folders of it in `journals`."""
        ((stored,),) = self._fetch(
            "SELECT coalesce(max(attempt), 0) FROM runs WHERE key = $key AND status <> 'skipped'",
            {"key": key},
        )
        return max(int(stored), tree.last_attempt(journals / key) if journals else 0) + 1

    def resume_checkpoint(self, key: str) -> tuple[str, int] | None:
        """(SHA-256, step) of the newest resume point of a run that is not ok; None: begin anew."""
        rows = self._fetch(
            "SELECT r.resume_checkpoint, r.resume_step FROM runs r JOIN latest_runs l ON l.key = r.key "
            "WHERE r.key = $key AND l.status <> 'ok' AND r.resume_checkpoint IS NOT NULL "
            "ORDER BY r.attempt DESC LIMIT 1",
            {"key": key},
        )
        return rows[0] if rows else None

    def final_checkpoint(self, key: str) -> str | None:
        """SHA-256 of the weights that an ok run ended with, where it kept them."""
        rows = self._fetch(
            "SELECT final_checkpoint FROM runs WHERE key = $key AND status = 'ok' "
            "AND final_checkpoint IS NOT NULL ORDER BY attempt DESC LIMIT 1",
            {"key": key},
        )
        return rows[0][0] if rows else None

    def needed_checkpoints(self) -> set[str]:
        """SHA-256 of all final weights, and of the resume points of runs that are not ok."""
        return {
            sha256
            for (sha256,) in self._fetch(
                "SELECT final_checkpoint FROM runs WHERE final_checkpoint IS NOT NULL UNION "
                "SELECT r.resume_checkpoint FROM runs r JOIN latest_runs l ON l.key = r.key "
                "WHERE l.status <> 'ok' AND r.resume_checkpoint IS NOT NULL",
                {},
            )
        }

    def verdicts(self, *, case: str | None = None) -> list[dict[str, Any]]:
        """Verdicts as dicts of the columns, JSON read, in order of case, size, claim and machine."""
        with self._database.session() as connection:
            return verdicts.load(connection, case)

    def query(self, sql: str, params: Sequence[Any] = ()) -> tuple[list[str], list[tuple[Any, ...]]]:
        """(column names, rows) of a user's SQL, which can neither change the database nor reach other files.

        Raises QueryError with DuckDB's message.
        """
        import duckdb

        with self._database.locked_down() as connection:
            try:
                cursor = connection.execute(sql, list(params))
                if cursor is None:
                    raise QueryError("no SQL was given; try: SHOW TABLES")
                return [column[0] for column in cursor.description or ()], cursor.fetchall()
            except duckdb.Error as error:
                raise QueryError(str(error)) from None

    def export(self, folder: Path, format: str) -> list[Path]:
        """Write each table to `folder` as TABLE.parquet, TABLE.csv or TABLE.jsonl; returns the files."""
        with self._database.session() as connection:
            return export_tables(connection, folder, format)

    def _fetch(self, sql: str, params: dict[str, Any]) -> list[Any]:
        with self._database.session() as connection:
            return connection.execute(sql, params).fetchall()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[DuckDBPyConnection]:
        import duckdb

        with self._database.session() as connection:
            connection.begin()
            try:
                yield connection
                connection.commit()
            except BaseException:
                with contextlib.suppress(duckdb.Error):  # after a failed commit there is nothing to roll back
                    connection.rollback()
                raise
