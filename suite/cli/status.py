"""`suite status [CASE]`: what became of the runs, and which are left."""

from __future__ import annotations

from pathlib import Path
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
    print_table,
    say,
)

if TYPE_CHECKING:
    from results.records import RunRow
    from results.store import Store
    from suite.execute import OutFolder


def status(
    case: Annotated[
        str | None, typer.Argument(help="A case file or name; all cases in the database without it.")
    ] = None,
    size: SizeOption = None,
    set_: SetOption = None,
    out: OutOption = DEFAULT_OUT,
    json: JsonOption = False,
) -> None:
    """What became of the runs: counts per case, or each run of one case."""
    from results.store import Store
    from suite.execute import OutFolder

    if case is None and (size is not None or set_):
        raise WrongCommand("suite status: --size and --set need a CASE")
    store = Store(out / "suite.duckdb", read_only=True, on_wait=say)
    rows = _cases(store) if case is None else _runs(store, OutFolder(out), case, size, list(set_ or []))
    if json:
        print_json(rows)
        return
    if not rows:
        say("no runs yet; `suite run CASE` makes some")
        return
    print_table(list(rows[0]), [[_text(name, value) for name, value in row.items()] for row in rows])


def _cases(store: Store) -> list[dict[str, Any]]:
    names, rows = store.query(
        "SELECT case_name AS case, size, count(*) AS runs, count(*) FILTER (status = 'ok') AS ok, "
        "coalesce(string_agg(DISTINCT status, ', ' ORDER BY status) FILTER (status <> 'ok'), '') AS not_ok, "
        "max(ended_at) AS last_ended FROM latest_runs GROUP BY ALL ORDER BY ALL"
    )
    return [dict(zip(names, row, strict=True)) for row in rows]


def _runs(
    store: Store, out: OutFolder, case: str, size: str | None, overrides: list[str]
) -> list[dict[str, Any]]:
    """The plan's runs in its order; of a case that cannot be declared any more, the database's."""
    from suite.declare import CaseError, expand, load_case

    try:
        plan = expand(load_case(case, overrides), size)
    except CaseError:
        stored = store.runs(case=Path(case).stem)
        if not stored or size is not None or overrides:
            raise
        return [_row(row.key, row.role, row.labels, row, out) for row in stored]
    found = store.status_of([run.key for run in plan.runs])
    rows = [_row(run.key, run.role, run.labels, found.get(run.key), out) for run in plan.runs]
    if not rows:
        raise WrongCommand(f"{case} has no runs at size {plan.size}")
    return rows


def _row(key: str, role: str, labels: dict[str, Any], row: RunRow | None, out: OutFolder) -> dict[str, Any]:
    from suite.execute.folder import is_locked

    status, reason = (row.status, row.reason) if row is not None else ("to do", "")
    if status != "ok" and is_locked(out, key):
        status, reason = "running", ""
    seconds = None
    if row is not None and row.started_at is not None and row.ended_at is not None:
        seconds = round((row.ended_at - row.started_at).total_seconds(), 1)
    return {
        "key": key,
        "status": status,
        "attempt": row.attempt if row is not None else 0,
        "seconds": seconds,
        "role": role,
        "labels": labels,
        "reason": reason,
    }


def _text(name: str, value: Any) -> Any:
    return " ".join(f"{axis}={member}" for axis, member in value.items()) if name == "labels" else value
