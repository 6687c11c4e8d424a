"""How verbs print (aligned text, a rich table or JSON; talk on stderr), and the options they share."""

from __future__ import annotations

import datetime
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from results.records import digits_between

OutOption = Annotated[
    Path, typer.Option("--out", help="Folder of the database, journals, checkpoints and site.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON on stdout instead of a table.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="A.B=VALUE", help="Override a field of the case's base; repeatable."),
]
SizeOption = Annotated[
    str | None,
    typer.Option("--size", help="laptop, gpu, node or cluster; the machine decides where not given."),
]
DEFAULT_OUT = Path("out")


def say(text: str) -> None:
    """One line of talk, on stderr."""
    print(text, file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    """Strict JSON on stdout: times in ISO 8601, NaN and infinities as null."""
    print(json.dumps(_plain(value), indent=2, ensure_ascii=False))


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(name): _plain(member) for name, member in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(member) for member in value]
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value.isoformat()
    if value is None or isinstance(value, str | int | bool):
        return value
    return str(value)


EXACT_DIGITS = 6


def print_verdicts(rows: Sequence[Mapping[str, Any]]) -> None:
    """Verdicts as a table that fits a terminal, then their reasons: in a column these would be unreadable."""
    print_table(
        ("claim", "verdict", "effect", "interval", "pairs"),
        [
            (row["claim_id"], row["verdict"], _short(row["effect"], row), _interval(row), row["num_pairs"])
            for row in rows
        ],
    )
    for row in rows:
        fidelity = "" if row["fidelity"] in (None, "native") else f" ({row['fidelity']})"
        print(f"{row['claim_id']}{fidelity}: {row['reason']}")


def _short(value: float | None, row: Mapping[str, Any]) -> str | None:
    """With the digits that the row's interval needs; what has none is exact, or one value alone."""
    digits = EXACT_DIGITS if row["low"] is None else digits_between(row["low"], row["high"])
    return None if value is None else f"{value:.{digits}g}"


def _interval(row: Mapping[str, Any]) -> str | None:
    low, high = _short(row["low"], row), _short(row["high"], row)
    return None if low is None or high is None else f"{low} to {high}"


def print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """A table on stdout: drawn by rich on a terminal, plain columns two spaces apart elsewhere."""
    cells = [[_cell(value) for value in row] for row in rows]
    if not columns:
        return
    if sys.stdout.isatty():
        _print_rich(columns, cells)
        return
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    for row in [list(columns), *cells]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


_WHOLE = 20
"""Columns no wider than this are never folded."""


def _print_rich(columns: Sequence[str], cells: Sequence[Sequence[str]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for position, column in enumerate(columns):
        # Keys, words and numbers stay whole; what does not fit is folded where the text is long.
        width = max(map(len, (column, *(row[position] for row in cells))))
        table.add_column(Text(column), overflow="fold", no_wrap=width <= _WHOLE)
    for row in cells:
        table.add_row(*(Text(cell) for cell in row))
    Console().print(table)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, datetime.datetime):
        return value.strftime("%Y-%m-%d %H:%M:%S")
    if isinstance(value, dict | list):
        return json.dumps(_plain(value), ensure_ascii=False)
    return str(value).replace("\n", " ")
