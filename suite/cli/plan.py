"""`suite plan CASE`: each run's cost, the time they take, and which claims this machine can decide."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

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
    from suite.declare.predict import Prediction, RunPrediction


def plan(
    case: Annotated[str, typer.Argument(help="A case file, or the name of a built-in case.")],
    size: SizeOption = None,
    set_: SetOption = None,
    out: OutOption = DEFAULT_OUT,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="Runs side by side, on a CPU counted by their ranks; default: one a core."),
    ] = None,
    trace: Annotated[
        bool | None,
        typer.Option(
            "--trace/--no-trace",
            help="Also trace a step of each kind of run without data; default: of several ranks, where that is quick.",
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Show what a case would run: costs, time, and which claims this machine can decide."""
    from results.store import Store
    from suite.declare import expand, load_case
    from suite.declare.predict import predict

    planned = expand(load_case(case, list(set_ or [])), size)
    database = out / "suite.duckdb"
    store = Store(database, read_only=True, on_wait=say) if database.exists() else None
    prediction = predict(planned, out, store, jobs=jobs, trace=trace, say=say)
    if json:
        print_json(prediction.as_json())
        return
    _show(prediction)


def _show(prediction: Prediction) -> None:
    print(f"{prediction.case}, size {prediction.size} ({prediction.size_reason}), on {prediction.machine}")
    columns = [
        (title, make)
        for title, make, always in _COLUMNS
        if always or any(make(run) not in ("", "1") for run in prediction.runs)
    ]
    print_table(
        [title for title, _ in columns], [[make(run) for _, make in columns] for run in prediction.runs]
    )
    left = len(prediction.runs) - prediction.num_done
    if left == 0:
        print(f"all {len(prediction.runs)} runs are done")
    else:
        print(_time_left(prediction, left))
    if prediction.claims:
        print_table(
            ("claim", "decidable here", "why"),
            [(claim.id, "yes" if claim.decidable else "no", claim.reason) for claim in prediction.claims],
        )


def _time_left(prediction: Prediction, left: int) -> str:
    sources = dict.fromkeys(run.seconds_source for run in prediction.runs)
    seconds = prediction.wall_seconds
    time = "in an unknown time" if seconds is None else f"in about {format_seconds(seconds)}"
    jobs = f"{prediction.jobs} side by side ({prediction.jobs_reason})"
    return f"{left} of {len(prediction.runs)} runs left, {time}, {jobs}; times from: {'; '.join(sources)}"


def _labels(run: RunPrediction) -> str:
    return " ".join(f"{axis}={member}" for axis, member in run.labels.items()) or run.role


_COLUMNS: tuple[tuple[str, Callable[[RunPrediction], str], bool], ...] = (
    ("key", lambda run: run.key, True),
    ("labels", _labels, True),
    ("status", lambda run: run.status, True),
    ("fidelity", lambda run: run.fidelity, True),
    ("ranks", lambda run: f"{run.num_ranks:,}", False),
    ("parameters", lambda run: "" if run.num_parameters is None else f"{run.num_parameters:,}", True),
    ("steps", lambda run: "" if run.num_steps is None else str(run.num_steps), True),
    ("peak", lambda run: "" if run.bytes is None else format_bytes(run.bytes["total"]), True),
    ("traced peak", lambda run: "" if run.traced_bytes is None else format_bytes(run.traced_bytes), False),
    ("exchanged a step", lambda run: "" if not run.comm_bytes else format_bytes(run.comm_bytes), False),
    ("idle", lambda run: "" if run.idle_share is None else f"{run.idle_share:.1%}", False),
    ("FLOPs", lambda run: "" if run.flops is None else f"{run.flops:.2e}", True),
    ("time", lambda run: format_seconds(run.seconds), True),
)
"""Title, text, and whether the column is shown where no run has anything in it. Peaks are the largest rank's."""


def format_bytes(num_bytes: int) -> str:
    """Binary units: `66.5 MiB`."""
    amount, units = float(num_bytes), ("B", "KiB", "MiB", "GiB", "TiB")
    for unit in units:
        if amount < 1024 or unit == units[-1]:
            break
        amount /= 1024
    return f"{amount:.0f} B" if unit == "B" else f"{amount:.1f} {unit}"


def format_seconds(seconds: float | None) -> str:
    """`12.3 s`, `4.1 min`, `7.0 h`, `31 days`; unknown where there is no figure."""
    if seconds is None:
        return "unknown"
    for limit, divisor, unit in ((90, 1, "s"), (5400, 60, "min"), (4 * 86400, 3600, "h")):
        if seconds < limit:
            return f"{seconds / divisor:.1f} {unit}"
    return f"{seconds / 86400:,.0f} days"
