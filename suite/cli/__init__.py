"""The command `suite`: one file a verb, each a thin layer over functions that Python users call too.

Verbs import what they need inside their functions: `suite --help` must answer at once, and nothing here may
load torch. Data goes to stdout, talk to stderr.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

import suite
from suite.cli.failures import settle

VERBS = (
    "run",
    "plan",
    "ledger",
    "status",
    "claims",
    "list",
    "report",
    "query",
    "export",
    "ingest",
    "merge",
    "quantize",
    "schema",
    "doctor",
)
"""In the order of `suite --help`. Module suite.cli.VERB has a function VERB: an exit status or None for 0."""


def _show_version(wanted: bool) -> None:
    if wanted:
        print(suite.__version__)
        raise typer.Exit


def _top(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Does what a paper says about precision, parallelism or an optimizer hold here, on this machine?

    Start with `suite list cases`, then `suite run CASE`.
    """


def make_app() -> typer.Typer:
    """The command line with all its verbs."""
    app = typer.Typer(
        add_completion=False,
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_top)
    for verb in VERBS:
        module = importlib.import_module(f"suite.cli.{verb}")
        app.command(verb)(getattr(module, verb))
    return app


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status (see `suite.cli.failures` for what each means)."""
    # Not list(): once its module is loaded, `list` is a name of this package.
    words = [*(sys.argv[1:] if arguments is None else arguments)]
    try:
        result: Any = make_app()(words, prog_name="suite", standalone_mode=False)
        sys.stdout.flush()
    except BaseException as error:
        return settle(error, words)
    return result if isinstance(result, int) else 0
