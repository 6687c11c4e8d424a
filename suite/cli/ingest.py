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
    target = OutFolder(out)
    target.create()
    journals = folder / "journals" if (folder / "journals").is_dir() else folder
    number = Store(target.database, on_wait=say).ingest_tree(journals)
    say(f"{number} runs brought something new into {target.database}")
