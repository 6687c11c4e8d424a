"""What a plan will cost and what it can settle, before anything runs: bytes, FLOPs, time, and claims.

    from suite.declare import expand, load_case
    from suite.declare.predict import predict
    predict(expand(load_case("fp8_long_horizon"), "laptop"), Path("out"))

Numbers of this file are of fidelity `predicted`: formulas of harness.ledger, and times from
suite.declare.timing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.data.vocabulary import vocab_size
from harness.ledger.flops import run_flops
from harness.ledger.memory import predict_memory
from harness.ledger.parameters import num_parameters
from results.environment import describe_environment
from suite.declare.plan import Plan, PlannedRun, nvidia_visible
from suite.declare.timing import PaceBook, run_seconds, wall_seconds
from suite.execute.resources import choose_jobs

if TYPE_CHECKING:
    from results.store import Store
    from suite.declare.schema import Claim

PATIENCE_S = 30 * 86400
"""A claim whose runs take longer than this here is not one that this machine decides."""


_OF_TRAINING = ("num_parameters", "num_steps", "tokens", "flops", "bytes", "peak_at")
"""Predictions that a study has none of."""


@dataclass(frozen=True)
class RunPrediction:
    """One run's cost on one rank."""

    key: str
    labels: dict[str, Any]
    role: str
    depends_on: str | None
    fidelity: str
    status: str
    """`done`, or `to do`."""
    task: str
    num_parameters: int | None
    """None, like all formulas below, for a study: they are those of training."""
    num_steps: int | None
    tokens: int | None
    flops: int | None
    bytes: dict[str, int] | None
    """Predicted peak by category, `total` among them."""
    peak_at: str | None
    """`backward` (its start: no gradients yet) or `update` (no activations any more)."""
    seconds: float | None
    seconds_source: str
    """What the time is based on, or why there is none."""


@dataclass(frozen=True)
class ClaimOutlook:
    """Whether this machine can decide a claim with this plan, and why not or with how many pairs."""

    id: str
    decidable: bool
    reason: str


@dataclass(frozen=True)
class Prediction:
    """A plan with its costs."""

    case: str
    size: str
    size_reason: str
    machine: str
    memory_bytes: int | None
    jobs: int
    jobs_reason: str
    num_done: int
    wall_seconds: float | None
    """Of the runs left to do, on `jobs` workers; None where a run has no time."""
    runs: tuple[RunPrediction, ...]
    claims: tuple[ClaimOutlook, ...]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def predict(
    plan: Plan,
    out: Path,
    store: Store | None = None,
    *,
    jobs: int | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Prediction:
    """Costs of a plan and the outlook of its claims; `store` (None: no database yet) says what is done.

    May start a worker for some seconds to time steps, and keeps what it found in OUT/calibration.json.
    """
    environment = describe_environment()
    rows = store.status_of([run.key for run in plan.runs]) if store is not None else {}
    done = {key for key, row in rows.items() if row.status == "ok"}
    paces = PaceBook(out, store)
    paces.calibrate([run.spec for run in plan.runs if run.spec.is_training and run.key not in done], say)
    runs = tuple(_predict_run(run, run.key in done, paces) for run in plan.runs)
    first = plan.runs[0].spec if plan.runs else None
    chosen, jobs_reason = choose_jobs(jobs, first.device, first.threads) if first else (1, "nothing to run")
    left = [run for run in runs if run.status == "to do"]
    timed = [(run.key, run.depends_on, run.seconds) for run in left if run.seconds is not None]
    return Prediction(
        case=plan.case.name,
        size=plan.size,
        size_reason=plan.size_reason,
        machine=str(environment["machine"]),
        memory_bytes=environment["memory_bytes"],
        jobs=chosen,
        jobs_reason=jobs_reason,
        num_done=len(done),
        wall_seconds=wall_seconds(timed, chosen) if len(timed) == len(left) else None,
        runs=runs,
        claims=tuple(_outlook(claim, plan, runs, environment["memory_bytes"]) for claim in plan.case.claims),
    )


def _predict_run(run: PlannedRun, done: bool, paces: PaceBook) -> RunPrediction:
    spec = run.spec
    about: dict[str, Any] = {
        "key": run.key,
        "labels": run.labels,
        "role": run.role,
        "depends_on": run.depends_on,
        "fidelity": spec.fidelity,
        "status": "done" if done else "to do",
        "task": spec.task,
    }
    if not spec.is_training:
        seconds, source = paces.study_seconds(spec)
        nothing: dict[str, Any] = dict.fromkeys(_OF_TRAINING)
        return RunPrediction(**about, **nothing, seconds=seconds, seconds_source=source)
    vocab = vocab_size(spec.data.tokenizer)
    pace = paces.pace(spec)
    memory = predict_memory(spec, vocab)
    return RunPrediction(
        **about,
        num_parameters=num_parameters(spec.model, vocab).total,
        num_steps=spec.num_steps,
        tokens=spec.tokens,
        flops=run_flops(spec, vocab),
        bytes=memory.as_dict(),
        peak_at=memory.moment,
        seconds=None if isinstance(pace, str) else run_seconds(spec, pace),
        seconds_source=pace if isinstance(pace, str) else pace.source,
    )


def _outlook(claim: Claim, plan: Plan, runs: tuple[RunPrediction, ...], memory: int | None) -> ClaimOutlook:
    """Reasons that no result could remove first, then those of this machine, then those of the seeds."""
    from suite.judge import blocker
    from suite.judge.measures import find_measure
    from suite.judge.pairing import make_units

    if reason := blocker(claim, plan):
        return ClaimOutlook(claim.id, False, reason)
    of = plan.select(claim.of)
    against = plan.select(claim.against) if claim.against is not None else None
    units, _ = make_units(of, against, {**claim.of, **(claim.against or {})})
    planned = {run.key: run for unit in units for run in unit.runs}
    needed = planned.keys() | {run.depends_on for run in runs if run.key in planned}
    predicted = [run for run in runs if run.key in needed]
    if reason := _beyond_this_machine(list(planned.values()), predicted, memory):
        return ClaimOutlook(claim.id, False, reason)
    seeds = len({unit.seed for unit in units})
    if find_measure(claim.measure).is_exact and seeds:
        return ClaimOutlook(claim.id, True, "the value is exact: one run decides")
    if seeds < 2:
        found = "no pair" if not seeds else "one pair"
        return ClaimOutlook(claim.id, False, f"{found} of runs; an interval needs at least 2 seeds")
    return ClaimOutlook(claim.id, True, f"{seeds} {'pairs' if against is not None else 'seeds'}")


def _beyond_this_machine(
    planned: list[Any], predicted: list[RunPrediction], memory: int | None
) -> str | None:
    specs = [run.spec for run in planned]
    if any(spec.device == "cuda" for spec in specs) and not nvidia_visible():
        return "its runs need an NVIDIA device, and none is visible here"
    if (ranks := max(spec.parallelism.num_ranks for spec in specs)) > 1:
        return f"its runs need {ranks} ranks, and this machine starts one"
    largest = max((run.bytes["total"] for run in predicted if run.bytes is not None), default=0)
    if memory is not None and specs[0].device == "cpu" and largest > memory:
        return f"a run needs about {largest / 2**30:,.1f} GiB, and this machine has {memory / 2**30:,.1f}"
    for run in planned:
        seconds = next(p.seconds for p in predicted if p.key == run.key)
        if seconds is not None and seconds > run.spec.limits.time_s:
            limit = _hours(run.spec.limits.time_s)
            return f"a run would take about {_hours(seconds)}, beyond its limit of {limit}"
    total = sum(run.seconds or 0.0 for run in predicted)
    if total > PATIENCE_S:
        return f"its runs would take about {_hours(total)} here"
    return None


def _hours(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:,.0f} h" if seconds < 4 * 86400 else f"{seconds / 86400:,.0f} days"
