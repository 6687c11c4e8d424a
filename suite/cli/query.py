"""`suite query "SQL"`: ask the database anything; it cannot be changed by asking."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from suite.cli.output import DEFAULT_OUT, JsonOption, OutOption, print_json, print_table, say


def query(
    sql: Annotated[str, typer.Argument(help='DuckDB SQL, such as "SELECT * FROM throughput".')],
    out: OutOption = DEFAULT_OUT,
    json: JsonOption = False,
) -> None:
    """Print the rows of a read-only SQL query.

    Tables: environments, runs, measurements, verdicts, alarms. Views: latest_runs, curves, loss_curves,
    memory_peaks, throughput, quantization_health.
    """
    from results.store import Store

    names, rows = Store(out / "suite.duckdb", read_only=True, on_wait=say).query(sql)
    if json:
        print_json([dict(zip(_distinct(names), row, strict=True)) for row in rows])
    else:
        print_table(names, rows)


def _distinct(names: Sequence[str]) -> list[str]:
    """Column names with repeated ones numbered, as in DuckDB's own tables: `loss`, `loss_1`."""
    return [f"{name}_{names[:i].count(name)}" if name in names[:i] else name for i, name in enumerate(names)]
