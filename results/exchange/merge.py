"""Runs of other machines, from a folder that `export` wrote as Parquet.

A run is known by its key and its start time. One that is new gets its attempt number if that is free, else
the next free one of its key; one that is known is replaced if the other side has read more of its journals.
Hence merging again changes nothing, and both machines' runs are kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from results.database import StoreError
from results.records import INTERRUPTED, SKIPPED, TABLES
from results.rows import find_run, select_runs, write_run

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection


@dataclass
class MergeResult:
    """What a merge did to the runs."""

    num_new: int = 0
    num_updated: int = 0
    num_known: int = 0
    renamed: dict[str, str] = field(default_factory=dict)
    """Their run_id -> the one it got here, for new runs whose number was taken."""


def merge_parquet(connection: DuckDBPyConnection, folder: Path) -> MergeResult:
    """Bring in the tables of `folder`; the caller's transaction."""
    import duckdb

    files = {table: str(folder / f"{table}.parquet") for table in TABLES}
    missing = [Path(path).name for path in files.values() if not Path(path).exists()]
    if missing:
        raise StoreError(
            f"{folder} has no {', '.join(missing)}; `suite export --format parquet` writes such a folder"
        )
    try:
        result, taken = _merge_runs(connection, files["runs"])
        _merge_measurements(connection, files["measurements"], taken)
        for table in ("environments", "alarms"):
            connection.execute(
                f"INSERT OR IGNORE INTO {table} BY NAME SELECT * FROM read_parquet(?)", [files[table]]
            ).fetchall()
        _merge_verdicts(connection, files["verdicts"])
    except (duckdb.InvalidInputException, duckdb.BinderException, duckdb.ConversionException) as error:
        raise StoreError(f"cannot merge {folder}: {error}") from error
    return result


def _merge_runs(connection: DuckDBPyConnection, path: str) -> tuple[MergeResult, list[tuple[str, str]]]:
    """Write the rows to take; returns (their run_id, ours) of those whose measurements are to follow."""
    result = MergeResult()
    taken: list[tuple[str, str]] = []
    for row in select_runs(connection, "read_parquet(?)", [path]):
        theirs = row["run_id"]
        attempt, stored = find_run(connection, row["key"], row["attempt"], row["started_at"])
        if stored is not None and _knowledge(row) <= _knowledge(stored):
            result.num_known += 1
            continue
        row |= {"attempt": attempt, "run_id": f"{row['key']}.{attempt}"}
        if stored is not None:
            result.num_updated += 1
            connection.execute("DELETE FROM measurements WHERE run_id = ?", [row["run_id"]]).fetchall()
        else:
            result.num_new += 1
            if row["run_id"] != theirs:
                result.renamed[theirs] = row["run_id"]
        write_run(connection, row, is_stored=stored is not None)
        taken.append((theirs, row["run_id"]))
    return result, taken


def _knowledge(row: Mapping[str, Any]) -> tuple[int, bool]:
    """Grows with what is known of a run: bytes of its journals, then whether anybody saw how it ended."""
    return sum(row["journal_bytes"].values()), row["status"] not in (INTERRUPTED, SKIPPED)


def _merge_measurements(connection: DuckDBPyConnection, path: str, taken: list[tuple[str, str]]) -> None:
    connection.execute(
        "INSERT INTO measurements BY NAME SELECT m.* REPLACE (ids.ours AS run_id) FROM read_parquet($path) m "
        "JOIN (SELECT unnest($theirs::TEXT[]) AS theirs, unnest($ours::TEXT[]) AS ours) ids "
        "ON m.run_id = ids.theirs",
        {"path": path, "theirs": [theirs for theirs, _ in taken], "ours": [ours for _, ours in taken]},
    ).fetchall()


def _merge_verdicts(connection: DuckDBPyConnection, path: str) -> None:
    """Of the same claim, size and machine the later verdict stays."""
    same = (
        "a.case_name = b.case_name AND a.size = b.size AND a.claim_id = b.claim_id "
        "AND a.machine IS NOT DISTINCT FROM b.machine"
    )
    connection.execute(
        "DELETE FROM verdicts a WHERE EXISTS "
        f"(SELECT 1 FROM read_parquet(?) b WHERE {same} AND b.decided_at > a.decided_at)",
        [path],
    ).fetchall()
    connection.execute(
        "INSERT INTO verdicts BY NAME SELECT * FROM read_parquet(?) b "
        f"WHERE NOT EXISTS (SELECT 1 FROM verdicts a WHERE {same})",
        [path],
    ).fetchall()
