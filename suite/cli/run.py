"""`suite run CASE`: run what is left of a case, judge its claims, show the verdicts and where the site is."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from suite.cli.failures import DIFFERS, INTERRUPTED, NOTHING, OK
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
    from suite.execute import Outcome
    from suite.pipeline import Answer


def run(
    case: Annotated[str, typer.Argument(help="A case file, or the name of a built-in case.")],
    size: SizeOption = None,
    set_: SetOption = None,
    out: OutOption = DEFAULT_OUT,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="Runs side by side, on a CPU counted by their ranks; default: one a core."),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 when a claim differs.")] = False,
    retry: Annotated[bool, typer.Option("--retry", help="Try diverged and oom runs again.")] = False,
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="LABEL=VALUE", help="Run these alone; repeatable.")
    ] = None,
    no_report: Annotated[bool, typer.Option("--no-report", help="Do not build the site.")] = False,
    json: JsonOption = False,
) -> int:
    """Run what is left of a case, judge its claims and build the site."""
    from suite.declare import expand, load_case
    from suite.execute.progress import show_progress
    from suite.pipeline import answer

    overrides, conditions = list(set_ or []), list(only or [])
    plan = expand(load_case(case, overrides), size)
    command = shlex.join(
        ["suite", "run", case, "--size", plan.size, *(f"--set={item}" for item in overrides)]
    )
    say(f"{plan.case.name}, size {plan.size} ({plan.size_reason}): {len(plan.runs)} runs")
    with show_progress() as tell:
        result = answer(
            plan,
            out,
            only=conditions,
            jobs=jobs,
            retry=retry,
            report=not no_report,
            command=command,
            on_event=tell,
        )
    if json:
        print_json(_as_json(result, plan.case.name, plan.size))
    _conclude(result, show_table=not json)
    code = result.outcome.exit_code
    if code == INTERRUPTED:
        say(f"interrupted; everything so far is stored. Go on with: {shlex.join(['suite', *sys.argv[1:]])}")
    elif code == NOTHING:
        say("nothing to run: the case has no runs at this size")
    elif code == OK and strict and any(verdict["verdict"] == "differs" for verdict in result.verdicts):
        say("a claim differs (--strict)")
        return DIFFERS
    return code


def _conclude(result: Answer, show_table: bool) -> None:
    say(_describe(result.outcome))
    if result.verdicts and show_table:
        print_verdicts(result.verdicts)
    if result.site is not None:
        say(f"site: {result.site}")


def _describe(outcome: Outcome) -> str:
    text = f"{outcome.num_ran} runs made, {outcome.num_done_before} were done before"
    counts: dict[str, int] = {}
    for status in outcome.statuses.values():
        counts[status] = counts.get(status, 0) + 1
    bad = [f"{number} {status}" for status, number in sorted(counts.items()) if status != "ok"]
    return f"{text}; not ok: {', '.join(bad)} (suite status says why)" if bad else text


def _as_json(result: Answer, case: str, size: str) -> dict[str, Any]:
    outcome = result.outcome
    return {
        "case": case,
        "size": size,
        "num_ran": outcome.num_ran,
        "num_done_before": outcome.num_done_before,
        "num_failed": outcome.num_failed,
        "interrupted": outcome.interrupted,
        "statuses": outcome.statuses,
        "verdicts": result.verdicts,
        "site": result.site,
    }
