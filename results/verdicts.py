"""Verdicts in the database: a judging replaces what was judged before of the same case, size and machine."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from results.rows import insert, select_dicts

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

_JSON_COLUMNS = ("claim", "pairs", "run_keys")


def save(connection: DuckDBPyConnection, rows: Sequence[Mapping[str, Any]]) -> None:
    """Store verdicts; keys of a row are columns of `verdicts`. `decided_at` is now where it is not given."""
    for where in {(row["case_name"], row["size"], row.get("machine")) for row in rows}:
        connection.execute(
            "DELETE FROM verdicts WHERE case_name = ? AND size = ? AND machine IS NOT DISTINCT FROM ?",
            list(where),
        ).fetchall()
    for row in rows:
        decided_at = row.get("decided_at") or datetime.now(UTC)
        if isinstance(decided_at, str):
            decided_at = datetime.fromisoformat(decided_at)
        if decided_at.tzinfo is not None:
            decided_at = decided_at.astimezone(UTC).replace(tzinfo=None)
        values = {name: json.dumps(value) if name in _JSON_COLUMNS else value for name, value in row.items()}
        insert(connection, "verdicts", {**values, "decided_at": decided_at})


def load(connection: DuckDBPyConnection, case: str | None) -> list[dict[str, Any]]:
    """Verdicts of one case or of all, in order of case, size, claim and machine."""
    rows = select_dicts(
        connection,
        "SELECT * FROM verdicts WHERE ?::TEXT IS NULL OR case_name = ? "
        "ORDER BY case_name, size, claim_id, machine",
        [case, case],
    )
    return [{**row, **{name: json.loads(row[name] or "null") for name in _JSON_COLUMNS}} for row in rows]
