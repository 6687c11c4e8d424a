"""`suite report`: judge again and build the site from what the database holds, without running anything."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from suite.cli.output import DEFAULT_OUT, OutOption, say


def report(
    to: Annotated[
        Path | None, typer.Option("-o", "--to", metavar="DIR", help="Folder of the site; default: OUT/site.")
    ] = None,
    out: OutOption = DEFAULT_OUT,
) -> None:
    """Judge all cases in the database again and build the site; prints the page to open."""
    import suite.pipeline
    from suite.execute import Event, Message

    def tell(event: Event) -> None:
        if isinstance(event, Message):
            say(event.text)

    print(suite.pipeline.report(out, site=to, on_event=tell))
