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
from harness.ledger.parameters import num_parameters
from harness.ledger.predict import predict_ranks
from harness.ledger.schedules import Pipeline
from harness.ledger.simulate import simulate
from harness.ledger.step import CATEGORIES, RankStep
from harness.spec import RunSpec
from harness.spec.model import NO_MODEL
from harness.spec.tasks import FIDELITY_OF_STUDY, TRAINING_TASKS
from results.environment import describe_environment
from suite.declare.feasible import ONE_STEP_STUDIES
from suite.declare.meshes import not_carried_out
from suite.declare.plan import Plan, PlannedRun, nvidia_visible
from suite.declare.timing import MOST_RANKS, PaceBook, run_seconds, wall_seconds
from suite.execute.resources import choose_jobs, slots_of, visible_gpus
from suite.tracing import FEW_LAYERS, traced_peaks

if TYPE_CHECKING:
    from results.store import Store
    from suite.declare.schema import Claim

PATIENCE_S = 30 * 86400
"""A claim whose runs take longer than this here is not one that this machine decides."""


_NOTHING: dict[str, Any] = dict.fromkeys(
    ("num_parameters", "num_steps", "tokens", "flops", "bytes", "peak_at", "traced_bytes", "comm_bytes")
)
"""Predictions that a study of something else than a training step has none of."""


@dataclass(frozen=True)
class RunPrediction:
    """One run's cost; bytes are those of the rank that needs most."""

    key: str
    labels: dict[str, Any]
    role: str
    depends_on: str | None
    fidelity: str
    status: str
    """`done`, or `to do`."""
    task: str
    num_ranks: int
    """Ranks of its mesh; a study that only predicts starts one process whatever they are."""
    num_parameters: int | None
    """None, like all formulas below, for a study that is not about a training step."""
    num_steps: int | None
    tokens: int | None
    flops: int | None
    bytes: dict[str, int] | None
    """Predicted peak by category, `total` among them."""
    peak_at: str | None
    """`forward`, `backward` or `update`."""
    traced_bytes: int | None
    """The same peak by tracing the real model without data; None where it was not traced."""
    comm_bytes: int | None
    """Payload of a step's collectives on the rank that exchanges most."""
    idle_share: float | None
    """Of a pipeline, at equal times of forward pass and both halves of the backward pass; None without one."""
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
    trace: bool | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Prediction:
    """Costs of a plan and the outlook of its claims; `store` (None: no database yet) says what is done.

    May start a worker for some seconds to time steps, and keeps what it found in OUT/calibration.json. `trace`: set
    traced peaks beside those by formula, or not; None: where runs of several ranks or studies of a step are traced
    in seconds.
    """
    environment = describe_environment()
    rows = store.status_of([run.key for run in plan.runs]) if store is not None else {}
    done = {key for key, row in rows.items() if row.status == "ok"}
    paces = PaceBook(out, store)
    paces.calibrate([run.spec for run in plan.runs if run.spec.is_training and run.key not in done], say)
    steps = [
        run.spec if is_of_a_step(run.spec) and not not_carried_out(run.spec) else None for run in plan.runs
    ]
    traces = traced_peaks(steps, out / "traces", trace, _is_quickly_traced, say)
    runs = tuple(
        _predict_run(run, run.key in done, paces, traced)
        for run, traced in zip(plan.runs, traces, strict=True)
    )
    first = plan.runs[0].spec if plan.runs else None
    chosen, jobs_reason = choose_jobs(jobs, first.device, first.threads) if first else (1, "nothing to run")
    left = [run for run in runs if run.status == "to do"]
    slots = {run.key: slots_of(run.spec.num_ranks, run.spec.device, chosen) for run in plan.runs}
    timed = [
        (run.key, run.depends_on, run.seconds, slots[run.key]) for run in left if run.seconds is not None
    ]
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


def _predict_run(run: PlannedRun, done: bool, paces: PaceBook, traced: int | None) -> RunPrediction:
    spec = run.spec
    refused = not_carried_out(spec)
    seconds, source = _seconds(spec, paces) if refused is None else (None, refused)
    mesh = spec.parallelism
    return RunPrediction(
        key=run.key,
        labels=run.labels,
        role=run.role,
        depends_on=run.depends_on,
        fidelity=spec.fidelity,
        status="done" if done else "to do" if refused is None else "refused",
        task=spec.task,
        num_ranks=mesh.num_ranks if is_of_a_step(spec) or spec.task == "pipeline" else 1,
        idle_share=simulate(Pipeline.of(mesh)).idle_share() if mesh.pp > 1 else None,
        seconds=seconds,
        seconds_source=source,
        **{**_NOTHING, **_of_a_step(spec, traced)},
    )


def is_of_a_step(spec: RunSpec) -> bool:
    """Whether a run trains, or is about one training step: it has a model."""
    return spec.model != NO_MODEL and spec.task in (*TRAINING_TASKS, *ONE_STEP_STUDIES)


def _is_quickly_traced(spec: RunSpec) -> bool:
    """The time of a trace goes with the operators of a step, whatever their size."""
    mesh = spec.parallelism
    several = mesh.num_ranks > 1 or not spec.is_training
    return several and spec.model.num_layers * spec.accumulation * mesh.num_microbatches <= FEW_LAYERS


def _of_a_step(spec: RunSpec, traced: int | None) -> dict[str, Any]:
    """What the formulas say, for a run that has a model."""
    if not is_of_a_step(spec):
        return {}
    vocab = vocab_size(spec.data.tokenizer)
    ranks = predict_ranks(spec, vocab)
    largest = max(ranks, key=lambda each: each.total)
    found: dict[str, Any] = {
        "num_parameters": num_parameters(spec.model, vocab).total,
        "bytes": _bytes(largest),
        "peak_at": largest.moment,
        "traced_bytes": traced,
        "comm_bytes": max(sum(c.num_bytes for c in each.collectives) for each in ranks),
    }
    if spec.is_training:
        found |= {"num_steps": spec.num_steps, "tokens": spec.tokens, "flops": run_flops(spec, vocab)}
    return found


def _bytes(one: RankStep) -> dict[str, int]:
    return {**{name: one.peak.get(name, 0) for name in CATEGORIES}, "total": one.total}


def _seconds(spec: RunSpec, paces: PaceBook) -> tuple[float | None, str]:
    if not spec.is_training:
        return paces.study_seconds(spec)
    pace = paces.pace(spec)
    return (None, pace) if isinstance(pace, str) else (run_seconds(spec, pace), pace.source)


def _outlook(claim: Claim, plan: Plan, runs: tuple[RunPrediction, ...], memory: int | None) -> ClaimOutlook:
    """Reasons that no result could remove first, then those of this machine, then those of the seeds."""
    from suite.judge import blocker, is_exact
    from suite.judge.measures import find_measure
    from suite.judge.pairing import make_units, unpaired_labels

    if reason := blocker(claim, plan):
        return ClaimOutlook(claim.id, False, reason)
    of = plan.select(claim.of)
    against = plan.select(claim.against) if claim.against is not None else None
    units, _ = make_units(of, against, unpaired_labels(claim))
    planned = {run.key: run for unit in units for run in unit.runs}
    needed = planned.keys() | {run.depends_on for run in runs if run.key in planned}
    predicted = [run for run in runs if run.key in needed]
    if reason := _beyond_this_machine(list(planned.values()), predicted, memory):
        return ClaimOutlook(claim.id, False, reason)
    seeds = len({unit.seed for unit in units})
    if is_exact(find_measure(claim.measure), planned.values()) and seeds:
        return ClaimOutlook(claim.id, True, "the value is exact: one run decides")
    if seeds < 2:
        found = "no pair" if not seeds else "one pair"
        return ClaimOutlook(claim.id, False, f"{found} of runs; an interval needs at least 2 seeds")
    return ClaimOutlook(claim.id, True, f"{seeds} {'pairs' if against is not None else 'seeds'}")


def _beyond_this_machine(
    planned: list[Any], predicted: list[RunPrediction], memory: int | None
) -> str | None:
    specs = [run.spec for run in planned]
    if refused := next(filter(None, map(not_carried_out, specs)), None):
        return f"this suite does not train its runs: {refused}"
    if any(spec.device == "cuda" for spec in specs) and not nvidia_visible():
        return "its runs need an NVIDIA device, and none is visible here"
    ranks = max(spec.num_ranks for spec in specs)
    if any(spec.device == "cuda" and spec.num_ranks > visible_gpus() for spec in specs):
        return f"its runs need {ranks} GPUs, one a rank, and {visible_gpus()} are visible here"
    processes = {run.key: 0 if run.spec.task in FIDELITY_OF_STUDY else run.spec.num_ranks for run in planned}
    if ranks > MOST_RANKS:
        return f"its runs need {ranks} ranks; on one machine's CPU at most {MOST_RANKS} are sensible"
    largest = max(
        (run.bytes["total"] * processes.get(run.key, 1) for run in predicted if run.bytes), default=0
    )
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
