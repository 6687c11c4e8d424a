"""`suite claims [CASE]`: every claim, what this database says about it, and why."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Annotated, Any

import typer

from suite.cli.failures import WrongCommand
from suite.cli.output import (
    DEFAULT_OUT,
    JsonOption,
    OutOption,
    SetOption,
    SizeOption,
    print_json,
    print_verdicts,
    say,
)

if TYPE_CHECKING:
    from suite.declare import Case


def claims(
    case: Annotated[
        str | None, typer.Argument(help="A case file or name; the stored verdicts of all cases without it.")
    ] = None,
    paper: Annotated[
        str | None, typer.Option("--paper", metavar="KEY", help="Claims of this paper alone.")
    ] = None,
    size: SizeOption = None,
    set_: SetOption = None,
    out: OutOption = DEFAULT_OUT,
    json: JsonOption = False,
) -> None:
    """Show claims with their verdicts: judged now for a CASE, as last stored for all cases."""
    if case is None and (size is not None or set_):
        raise WrongCommand("suite claims: --size and --set need a CASE")
    rows = _stored(out) if case is None else _judged(case, size, list(set_ or []), out)
    if paper is not None:
        rows = _of_paper(rows, paper)
    if json:
        print_json(rows)
        return
    if not rows:
        of_paper = "" if paper is None else f" on {paper}"
        say(
            f"no verdicts{of_paper} yet; `suite run CASE` makes some, `suite claims CASE` judges what there is"
        )
    for (name, of_size), group in itertools.groupby(rows, lambda row: (row["case_name"], row["size"])):
        print(f"{name}, size {of_size}")
        print_verdicts([*group])


def _judged(case: str, size: str | None, overrides: list[str], out: Any) -> list[dict[str, Any]]:
    from results.store import Store
    from suite.declare import expand, load_case
    from suite.judge import judge

    declared = load_case(case, overrides)
    plan = expand(declared, size)
    with Store(out / "suite.duckdb", read_only=True, on_wait=say) as store:
        verdicts = judge(plan, store)
    return [{**verdict.as_json(), "paper": _paper_of(verdict.claim, declared)} for verdict in verdicts]


def _stored(out: Any) -> list[dict[str, Any]]:
    from results.store import Store
    from suite.declare import CaseError, load_case

    cases: dict[str, Case | None] = {}
    rows = Store(out / "suite.duckdb", read_only=True, on_wait=say).verdicts()
    for row in rows:
        name = row["case_name"]
        if name not in cases:
            try:
                cases[name] = load_case(name)
            except CaseError:
                cases[name] = None  # a case of the user's own, or one that is gone
        row["paper"] = _paper_of(row["claim"], cases[name])
    return rows


def _paper_of(claim: Any, case: Case | None) -> str | None:
    """The claim's own paper, else the case's first."""
    key = ((claim or {}).get("paper") or {}).get("key")
    return key or (case.papers[0] if case is not None and case.papers else None)


def _of_paper(rows: list[dict[str, Any]], paper: str) -> list[dict[str, Any]]:
    from suite.declare import papers

    known = papers()
    if paper not in known and all(row["paper"] != paper for row in rows):
        import difflib

        near = difflib.get_close_matches(paper, known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise WrongCommand(f"suite claims: unknown paper {paper!r}; there are {', '.join(known)}{hint}")
    return [row for row in rows if row["paper"] == paper]
