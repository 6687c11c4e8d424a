"""How long runs will take on this machine, from the best source there is, named with each figure.

Best are runs of the same shape that this database measured here; next a few real steps, timed once by a
worker and kept in OUT/calibration.json; last, for models too large to try, the rate of matrix products.
Probes and waiting for other work on the machine are only in the first.
"""

from __future__ import annotations

import json
import statistics
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from harness.data.vocabulary import vocab_size
from harness.launch.base import python_command, worker_environment
from harness.ledger.flops import run_flops, train_flops_per_token
from harness.ledger.predict import predict_step
from harness.spec import DataSpec, ParallelismSpec, RunSpec
from results.environment import describe_environment
from suite.declare.plan import nvidia_visible
from suite.execute.resources import usable_cores, visible_gpus

if TYPE_CHECKING:
    from results.records import RunRow
    from results.store import Store

CALIBRATION_STEPS = 4
MAX_STEP_FLOPS = 2e11
"""A step of more than this is not tried on a CPU: it would take seconds."""
GEMM_SHARE = 0.5
"""Assumed share of the rate of matrix products that training reaches. At 60M parameters on one core it was
three quarters in FP32, a quarter in BF16 with matrix units: such times are right within a factor of two."""
GROUP_START_S = 5.0
"""Assumed: starting a group of ranks and its rendezvous, and loading what they communicate with."""
MOST_RANKS = 32
"""More ranks are left to a cluster: neither their time nor their claims are for one machine."""
TIMEOUT_S = 120


@dataclass(frozen=True)
class Pace:
    """Seconds of a step and of what comes before the first, and where they are from."""

    step_s: float
    setup_s: float
    source: str


class PaceBook:
    """Paces of runs on this machine. Looks up at once; `calibrate` fills in what nothing has measured."""

    def __init__(self, out: Path, store: Store | None) -> None:
        self._file = out / "calibration.json"
        self._machine = str(describe_environment()["machine"])
        self._measured, self._studies = _measured(store, self._machine) if store is not None else ({}, {})
        self._calibrated, self._rates = self._load()
        self._errors: dict[str, str] = {}

    def pace(self, spec: RunSpec) -> Pace | str:
        """The pace of a run, or why there is none."""
        key = shape_of(spec).key
        if spec.device == "cuda" and not nvidia_visible():
            return "no NVIDIA device here to time it on"
        if key in self._measured:
            step_s, count = self._measured[key]
            return Pace(step_s, 0.0, f"{count} earlier run{'s' if count > 1 else ''} of this shape here")
        if spec.num_ranks > 1:
            return self._of_ranks(spec)
        if key in self._calibrated:
            entry = self._calibrated[key]
            return Pace(entry["step_s"], entry["setup_s"], f"{CALIBRATION_STEPS} timed steps")
        rate = self._rates.get(spec.precision.compute)
        if key in self._errors or rate is None:
            return self._errors.get(key, "not calibrated")
        tokens = spec.batch_size * spec.seq_len
        flops = tokens * train_flops_per_token(spec.model, spec.seq_len, vocab_size(spec.data.tokenizer))
        casts = ", emulated casts not counted" if spec.precision.recipe is not None else ""
        source = f"{GEMM_SHARE:.0%} of this machine's matrix-product rate{casts}"
        return Pace(flops / (GEMM_SHARE * rate), 0.0, source)

    def _of_ranks(self, spec: RunSpec) -> Pace | str:
        """Of a group, from one process's steps. A small model's step is the time of its operators, which every rank
        has to start, so ranks beyond the cores stretch it; a large one's is arithmetic, which they share."""
        workers = visible_gpus() if spec.device == "cuda" else usable_cores()
        ranks = spec.num_ranks
        if ranks > (workers if spec.device == "cuda" else MOST_RANKS):
            return f"{ranks} ranks are too many for this machine"
        alone = self.pace(one_process(spec))
        if isinstance(alone, str):
            return alone
        factor = max(1.0, ranks / workers) if _can_be_tried(spec) else 1.0 / min(ranks, workers)
        where = "GPUs" if spec.device == "cuda" else f"core{'s' if workers > 1 else ''}"
        source = (
            f"{alone.source} of one process, {ranks} ranks on {workers} {where}, communication not counted"
        )
        return Pace(alone.step_s * factor, alone.setup_s + GROUP_START_S, source)

    def study_seconds(self, spec: RunSpec) -> tuple[float | None, str]:
        """Seconds of a run that does not train, and where they are from. Nothing is tried out for it."""
        if spec.device == "cuda" and not nvidia_visible():
            return None, "no NVIDIA device here to time it on"
        own, task = self._studies.get(spec.key), self._studies.get(spec.task)
        seconds = own or task
        if not seconds:
            return None, f"no earlier run of task {spec.task} here"
        runs = f"{len(seconds)} earlier run{'s' if len(seconds) > 1 else ''}"
        return statistics.median(seconds), f"{runs} of {'this study' if own else f'task {spec.task}'} here"

    def calibrate(self, specs: Iterable[RunSpec], say: Callable[[str], None] = lambda text: None) -> None:
        """Time what has no pace yet, in a worker process, and keep the figures in OUT/calibration.json."""
        unknown: dict[str, RunSpec] = {}
        for spec in specs:
            if self.pace(spec) == "not calibrated":
                alone = one_process(spec)
                unknown.setdefault(shape_of(alone).key, alone)
        if not unknown:
            return
        small = {key: shape_of(spec) for key, spec in unknown.items() if _can_be_tried(spec)}
        dtypes = sorted({spec.precision.compute for key, spec in unknown.items() if key not in small})
        say(f"timing a few steps of {len(small)} kinds of run; kept in {self._file}")
        try:
            answer = _ask_worker(list(small.values()), dtypes)
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            reason = f"calibration failed: {str(error).strip().splitlines()[-1]}"
            self._errors |= dict.fromkeys(unknown, reason)
            say(reason)
            return
        # The first run alone reads the corpus, which each run of the case does for itself.
        setup_s = max((entry.get("setup_s", 0.0) for entry in answer["runs"]), default=0.0)
        for key, entry in zip(small, answer["runs"], strict=True):
            if "error" in entry:
                self._errors[key] = f"calibration failed: {entry['error']}"
            else:
                self._calibrated[key] = {**entry, "setup_s": setup_s}
        self._rates |= answer["gemm_flops_per_s"]
        self._save()

    def _load(self) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
        try:
            kept = json.loads(self._file.read_text())
            if kept["machine"] == self._machine:
                return kept["runs"], kept["gemm_flops_per_s"]
        except (OSError, ValueError, KeyError, TypeError):
            pass  # none yet, or not ours: it is made again
        return {}, {}

    def _save(self) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        content = {"machine": self._machine, "runs": self._calibrated, "gemm_flops_per_s": self._rates}
        temporary = self._file.with_suffix(".new")
        temporary.write_text(json.dumps(content, indent=1))
        temporary.replace(self._file)


def one_process(spec: RunSpec) -> RunSpec:
    """The same run without a mesh."""
    return spec.model_copy(update={"parallelism": ParallelismSpec(name="single")})


def shape_of(spec: RunSpec) -> RunSpec:
    """A short run whose steps cost what those of `spec` do: same model, formats, batch and threads."""
    model = spec.model.model_copy(
        update={"vocab_size": spec.model.vocab_size or vocab_size(spec.data.tokenizer)}
    )
    return RunSpec(
        task=spec.task,
        model=model,
        precision=spec.precision,
        parallelism=spec.parallelism,
        data=DataSpec(),
        tokens=CALIBRATION_STEPS * spec.batch_size * spec.seq_len,
        batch_size=spec.batch_size,
        seq_len=spec.seq_len,
        accumulation=spec.accumulation,
        recompute=spec.recompute,
        val_tokens=0,
        threads=spec.threads,
        device=spec.device,
    )


def run_seconds(spec: RunSpec, pace: Pace) -> float:
    """Wall time of a run at a pace: its steps, and its validation in proportion to its FLOPs."""
    vocab = vocab_size(spec.data.tokenizer)
    step_flops = spec.batch_size * spec.seq_len * train_flops_per_token(spec.model, spec.seq_len, vocab)
    return pace.setup_s + pace.step_s * run_flops(spec, vocab) / step_flops


def wall_seconds(runs: Sequence[tuple[str, str | None, float, int]], jobs: int) -> float:
    """Wall time of (key, key it depends on, seconds, slots it takes) in `jobs` slots, in order, bases before their
    arms."""
    free = [0.0] * jobs
    ended: dict[str, float] = {}
    for key, depends_on, seconds, slots in runs:
        free.sort()
        ended[key] = max(free[slots - 1], ended.get(depends_on or "", 0.0)) + seconds
        free[:slots] = [ended[key]] * slots
    return max(free)


def _can_be_tried(spec: RunSpec) -> bool:
    vocab = vocab_size(spec.data.tokenizer)
    flops = spec.batch_size * spec.seq_len * train_flops_per_token(spec.model, spec.seq_len, vocab)
    memory = describe_environment()["memory_bytes"]
    fits = memory is None or predict_step(spec, vocab).total < memory / 4
    return fits and (spec.device == "cuda" or flops < MAX_STEP_FLOPS)


def _measured(store: Store, machine: str) -> tuple[dict[str, tuple[float, int]], dict[str, list[float]]]:
    """What runs here took.

    Shape's key -> (median of whole runs' seconds a step, with validation and probes; number of runs), and for studies
    key and task -> seconds of whole runs.
    """
    steps: dict[str, list[float]] = {}
    studies: dict[str, list[float]] = {}
    machines: dict[str, Any] = {}
    for row in store.runs():
        seconds = _undisturbed_seconds(row)
        if seconds is None or row.environment_id is None:
            continue
        if row.environment_id not in machines:
            machines[row.environment_id] = (store.environment(row.environment_id) or {}).get("machine")
        if machines[row.environment_id] != machine:
            continue
        try:
            spec = RunSpec.model_validate(row.spec)
        except ValidationError:
            continue  # written by another version of the suite
        if not spec.is_training:
            for name in (spec.key, spec.task):
                studies.setdefault(name, []).append(seconds)
        elif spec.fault is None:
            steps.setdefault(shape_of(spec).key, []).append(seconds / spec.num_steps)
    paces = {key: (statistics.median(values), len(values)) for key, values in steps.items()}
    return paces, studies


def _undisturbed_seconds(row: RunRow) -> float | None:
    """Wall time of a run that went through at its first attempt."""
    if row.status != "ok" or row.attempt != 1 or row.started_at is None or row.ended_at is None:
        return None
    return (row.ended_at - row.started_at).total_seconds()


def _ask_worker(specs: Sequence[RunSpec], dtypes: Sequence[str]) -> dict[str, Any]:
    request = {"specs": [spec.model_dump(mode="json") for spec in specs], "dtypes": list(dtypes)}
    done = subprocess.run(
        python_command("harness.calibrate"),
        input=json.dumps(request),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=worker_environment(),
        check=False,
    )
    if done.returncode:
        raise ValueError(done.stderr or f"exit status {done.returncode}")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer
