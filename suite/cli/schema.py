"""`suite schema`: the JSON Schema of case files, for editors."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from suite.cli.output import JsonOption, print_json, say


def schema(
    to: Annotated[Path | None, typer.Option("-o", "--to", metavar="FILE", help="Write it to a file.")] = None,
    json: JsonOption = True,
) -> None:
    """Print the JSON Schema of a case file (it is JSON with or without --json).

    An editor with the YAML language server uses it when a case begins with
    `# yaml-language-server: $schema=FILE`.
    """
    from json import dumps

    from suite.declare.json_schema import case_json_schema

    if to is None:
        print_json(case_json_schema())
        return
    to.write_text(dumps(case_json_schema(), indent=2) + "\n")
    say(f"{to} written")
