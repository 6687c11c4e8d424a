"""`suite export`: the tables as files for other tools."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from suite.cli.failures import WrongCommand
from suite.cli.output import DEFAULT_OUT, OutOption, say

FORMATS = ("parquet", "csv", "jsonl")


def export(
    to: Annotated[Path, typer.Option("-o", "--to", metavar="DIR", help="Folder for the files.")],
    format: Annotated[str, typer.Option("--format", help="parquet, csv or jsonl.")] = "parquet",
    out: OutOption = DEFAULT_OUT,
) -> None:
    """Write every table to a file; prints the files' paths."""
    from results.store import Store

    if format not in FORMATS:
        raise WrongCommand(f"suite export: unknown format {format!r}; there are {', '.join(FORMATS)}")
    for path in Store(out / "suite.duckdb", read_only=True, on_wait=say).export(to, format):
        print(path)
