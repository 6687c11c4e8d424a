"""`suite ingest DIR`: take in journals, from this machine or copied from another."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from suite.cli.failures import WrongCommand
from suite.cli.output import DEFAULT_OUT, OutOption, say


def ingest(
    folder: Annotated[
        Path, typer.Argument(help="A folder of journals (KEY/ATTEMPT below it), or an out folder.")
    ],
    out: OutOption = DEFAULT_OUT,
) -> None:
    """Take the journals below a folder into the database; doing it again changes nothing."""
    from results.store import Store
    from suite.execute import OutFolder

    if not folder.is_dir():
        raise WrongCommand(f"{folder} is not a folder")
    journals = folder / "journals" if (folder / "journals").is_dir() else folder
    if next(journals.glob("*/*/run.json"), None) is None:
        raise WrongCommand(f"{journals} has no run: there is no KEY/ATTEMPT/run.json below it")
    target = OutFolder(out)
    target.create()
    number = Store(target.database, on_wait=say).ingest_tree(journals)
    say(f"{target.database}: {number} {'run' if number == 1 else 'runs'} brought something new")
