"""`suite ingest PATH`: take in journals of this or another machine, or a session of pytest-benchmark."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from suite.cli.failures import WrongCommand
from suite.cli.output import DEFAULT_OUT, OutOption, say

if TYPE_CHECKING:
    from results.store import Store


def ingest(
    path: Annotated[
        Path,
        typer.Argument(
            help="A folder of journals (KEY/ATTEMPT below it), an out folder, or a file of "
            "`pytest --benchmark-json` or a folder of them."
        ),
    ],
    out: OutOption = DEFAULT_OUT,
) -> None:
    """Take journals, or benchmarks of pytest-benchmark, into the database; doing it again changes nothing."""
    from results.exchange.benchmarks import is_session
    from results.store import Store
    from suite.execute import OutFolder

    if not path.exists():
        raise WrongCommand(
            f"{path} is not a folder of journals, nor a file of pytest-benchmark: it is not there"
        )
    target = OutFolder(out)
    store = Store(target.database, on_wait=say)
    if path.is_file():
        target.create()
        _ingest_sessions(store, [path])
        return
    journals = path / "journals" if (path / "journals").is_dir() else path
    if next(journals.glob("*/*/run.json"), None) is not None:
        target.create()
        number = store.ingest_tree(journals)
        say(f"{target.database}: {number} {'run' if number == 1 else 'runs'} brought something new")
        return
    files = sorted(file for file in path.rglob("*.json") if is_session(file))
    if not files:
        raise WrongCommand(
            f"{journals} has no run (no KEY/ATTEMPT/run.json below it) and no file of pytest-benchmark"
        )
    target.create()
    _ingest_sessions(store, files)


def _ingest_sessions(store: Store, files: Iterable[Path]) -> None:
    for file in files:
        is_new = store.ingest_benchmarks(file)
        say(f"{store.path}: {file} {'is in' if is_new else 'was in already'}")
