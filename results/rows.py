"""Rows of the tables as dicts, and what makes two rows the same run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from results.records import SKIPPED

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

FIDELITY_OF_BACKEND = {"emulated": "emulated", "torch": "native", "transformer_engine": "native"}
"""Backend of a precision recipe (harness.precision.backends) -> fidelity of a run that it carried out."""

_JSON_COLUMNS = ("labels", "spec", "notes", "journal_bytes")
_ENVIRONMENT_COLUMNS = (
    "hostname", "machine", "cpu", "num_cores", "memory_bytes", "gpu", "driver", "os", "python", "torch",
    "packages", "git_commit",
)  # fmt: skip


def to_time(unix_s: float) -> datetime:
    """UTC without a zone, as the database keeps times."""
    return datetime.fromtimestamp(unix_s, UTC).replace(tzinfo=None)


def select_dicts(
    connection: DuckDBPyConnection, sql: str, params: Sequence[Any] = ()
) -> list[dict[str, Any]]:
    """The rows of a query by column name."""
    cursor = connection.execute(sql, list(params))
    names = [column[0] for column in cursor.description or ()]
    return [dict(zip(names, values, strict=True)) for values in cursor.fetchall()]


def insert(connection: DuckDBPyConnection, table: str, row: Mapping[str, Any]) -> None:
    """Insert one row by column name."""
    sql = f"INSERT INTO {table} ({', '.join(row)}) VALUES ({', '.join('?' * len(row))})"
    connection.execute(sql, list(row.values())).fetchall()


def select_runs(
    connection: DuckDBPyConnection, source: str, params: Sequence[Any] = ()
) -> list[dict[str, Any]]:
    """Rows of `runs` or a relation of the same columns, JSON columns read, in order of key and attempt."""
    rows = select_dicts(connection, f"SELECT * FROM {source} ORDER BY key, attempt", params)
    return [{**row, **{name: json.loads(row[name] or "{}") for name in _JSON_COLUMNS}} for row in rows]


def write_run(connection: DuckDBPyConnection, row: Mapping[str, Any], *, is_stored: bool) -> None:
    """Insert a run's row, or update the stored one (an upsert of DuckDB takes thrice the time)."""
    values = {name: json.dumps(value) if name in _JSON_COLUMNS else value for name, value in row.items()}
    if not is_stored:
        insert(connection, "runs", values)
        return
    run_id = values.pop("run_id")
    changes = ", ".join(f"{name} = ?" for name in values)
    connection.execute(f"UPDATE runs SET {changes} WHERE run_id = ?", [*values.values(), run_id]).fetchall()


def find_run(
    connection: DuckDBPyConnection, key: str, attempt: int, started_at: datetime | None
) -> tuple[int, dict[str, Any] | None]:
    """(attempt, stored row) of the run of `key` that started then; without a row, the attempt it is to get.

    Two machines may both have made attempt 1 of a key. The start time, to the microsecond, tells them
    apart; the one that comes later into this database gets the next free attempt. A row without a start
    time gives way.
    """
    taken = {row["attempt"]: row for row in select_runs(connection, "runs WHERE key = ?", [key])}
    for number, row in taken.items():
        if started_at is not None and row["started_at"] == started_at:
            return number, row
    same = taken.get(attempt)
    if same is not None and started_at is not None and same["started_at"] is not None:
        return max(taken) + 1, None
    return attempt, same


def noted_fidelity(notes: Mapping[str, Mapping[str, Any]]) -> str | None:
    """What a run's arithmetic turned out to be, by its worker's note `fidelity`, else `backend`; None without either.

    A request cannot know: with backend auto it is the worker's device that decides.
    """
    if (said := notes.get("fidelity", {}).get("value")) in FIDELITY_OF_BACKEND.values():
        return str(said)
    backend = notes.get("backend", {}).get("value")
    return FIDELITY_OF_BACKEND.get(backend) if isinstance(backend, str) else None


def request_columns(request: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of `runs` that a run's request fixes, run_id and attempt apart."""
    spec = request["spec"]
    precision = spec.get("precision")
    emulated = isinstance(precision, Mapping) and precision.get("recipe")
    return {
        "key": request["key"],
        "case_name": request.get("case"),
        "size": request.get("size"),
        "role": request.get("role", "arm"),
        "labels": request.get("labels") or {},
        "spec": spec,
        "fidelity": request.get("fidelity") or ("emulated" if emulated else "native"),
        "device": spec.get("device"),
        "start_checkpoint": request.get("start_checkpoint"),
        "command": request.get("command"),
        "suite_version": request.get("suite_version"),
    }


def skip_run(connection: DuckDBPyConnection, request: Mapping[str, Any], reason: str) -> None:
    """A `skipped` row under the attempt after the real ones, over an earlier skipped row if that is there."""
    key = request["key"]
    rows = select_runs(connection, "runs WHERE key = ?", [key])
    attempt = max((row["attempt"] for row in rows if row["status"] != SKIPPED), default=0) + 1
    row = {
        **request_columns(request),
        "run_id": f"{key}.{attempt}",
        "attempt": attempt,
        "status": SKIPPED,
        "reason": reason,
        "notes": request.get("auto") or {},
        "journal_bytes": {},
    }
    write_run(connection, row, is_stored=any(stored["attempt"] == attempt for stored in rows))


def save_environment(connection: DuckDBPyConnection, environment: Mapping[str, Any]) -> str:
    """Keep an environment, once; its id is a hash of everything but the details."""
    known = {name: environment.get(name) for name in _ENVIRONMENT_COLUMNS}
    environment_id = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:16]
    stored = connection.execute("SELECT 1 FROM environments WHERE environment_id = ?", [environment_id])
    if stored.fetchall():
        return environment_id
    row = {
        "environment_id": environment_id,
        **known,
        "packages": json.dumps(known["packages"] or {}),
        "details": json.dumps(environment.get("details") or {}),
    }
    insert(connection, "environments", row)
    return environment_id
