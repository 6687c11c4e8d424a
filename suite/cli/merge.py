"""`suite merge OTHER`: bring another database's results into this one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from suite.cli.failures import WrongCommand
from suite.cli.output import DEFAULT_OUT, OutOption, say


def merge(
    other: Annotated[
        Path, typer.Argument(help="A .duckdb file, an out folder, or a folder of exported Parquet.")
    ],
    out: OutOption = DEFAULT_OUT,
) -> None:
    """Bring in the results of another database; doing it again changes nothing."""
    from results.store import Store
    from suite.execute import OutFolder

    if not other.exists():
        raise WrongCommand(f"{other} does not exist")
    if (other / "suite.duckdb").is_file():
        other = other / "suite.duckdb"
    target = OutFolder(out)
    target.create()
    result = Store(target.database, on_wait=say).merge(other)
    say(
        f"merged {other} into {target.database}: {result.num_new} new runs, {result.num_updated} updated, "
        f"{result.num_known} known before"
    )
    for theirs, ours in result.renamed.items():
        say(f"{theirs} there is {ours} here: both databases had a run of that name")
