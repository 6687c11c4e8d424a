"""The tables as files: Parquet (lossless, what `merge` reads), CSV and JSON lines for other tools.

Non-finite values are `nan` and `inf` in CSV, and in JSON lines the literals NaN and Infinity, which Python
and DuckDB read.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from results.database import StoreError
from results.records import TABLES

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

_OPTIONS = {
    "parquet": "FORMAT parquet, COMPRESSION zstd",
    "csv": "FORMAT csv, HEADER true",
    "jsonl": "FORMAT json",
}
FORMATS = tuple(_OPTIONS)


def export_tables(connection: DuckDBPyConnection, folder: Path, format: str) -> list[Path]:
    """Write every table to `folder`, rows sorted; returns the files. A file appears when it is whole.

    Raises StoreError for an unknown format.
    """
    if format not in _OPTIONS:
        raise StoreError(f"unknown format {format!r}; use one of {', '.join(FORMATS)}")
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for table in TABLES:
        path = folder / f"{table}.{format}"
        unfinished = path.with_suffix(".unfinished")
        connection.execute(
            f"COPY (SELECT * FROM {table} ORDER BY ALL) TO ? ({_OPTIONS[format]})", [str(unfinished)]
        ).fetchall()
        unfinished.replace(path)
        paths.append(path)
    return paths
