"""Made-up but plausible runs in a real case, real journals and a real database, without training.

python tests/suite/report/made_up_site.py /tmp/demo 250    # out folder, steps a run; prints the site's index
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from results.journal import JournalWriter
from results.store import Store
from suite.declare import Plan, PlannedRun, expand, load_case
from suite.judge import judge
from suite.report import build_site

TOKENS_A_STEP = 8 * 128

CASE = """
question: {question}
paper: fishman2024
base: {{model: llama-1m, precision: bf16, batch_size: 8, seq_len: 128}}
matrix:
  precision: [bf16, fp8-delayed, fp8-current]
  model.ffn: [swiglu, smooth-swiglu, smooth-swiglu-token]
  ageing: [none, static-16, sporadic-16]
  seed: [0, 1, 2]
sizes:
  laptop: {{tokens: {tokens}, start_from: {{tokens: {base_tokens}}}}}
  gpu: {{model: llama-125m, tokens: 2B}}
probes: {{quantization: 10, alignment: 10, memory: 50}}
claims:
  - id: aged-fp8-breaks
    paper:
      says: plain FP8 diverges after about 200B tokens
      where: abstract, figure 1
      value: 200B
      unit: tokens
      conditions: {{hardware: 256 Gaudi2, model: Llama2-7B, tokens: 2T}}
      provenance: read
      not_stated: [length of the amax history]
    measure: final_loss_gap
    of: {{precision: fp8-delayed, model.ffn: swiglu, ageing: sporadic-16}}
    against: {{precision: bf16, model.ffn: swiglu, ageing: sporadic-16}}
    expect: {{above: 0.05}}
    why: a gap of 0.05 nats is ten times the spread between seeds
  - id: smooth-matches-bf16
    paper: {{says: Smooth-SwiGLU is on par with BF16, where: table 2, provenance: secondary}}
    measure: final_loss_gap
    of: {{precision: fp8-delayed, model.ffn: smooth-swiglu, ageing: sporadic-16}}
    against: {{precision: bf16, model.ffn: swiglu, ageing: sporadic-16}}
    expect: {{non_inferior_within: 0.01}}
  - id: current-scaling-holds
    measure: final_loss_gap
    of: {{precision: fp8-current, model.ffn: swiglu, ageing: static-16}}
    against: {{precision: bf16, model.ffn: swiglu, ageing: static-16}}
    expect: {{within: [-0.002, 0.002]}}
    why: current scaling should not see static outliers of one channel
  - id: smooth-helps
    measure: min_ffn_output_sqnr_db_gap
    of: {{precision: fp8-delayed, model.ffn: smooth-swiglu-token, ageing: static-16}}
    against: {{precision: fp8-delayed, model.ffn: swiglu, ageing: static-16}}
    expect: {{above: 30}}
  - id: natural-growth
    measure: alignment_growth
    of: {{precision: bf16, model.ffn: swiglu, ageing: none}}
    expect: {{above: 0.2}}
  - id: throughput
    paper:
      says: about 34 % more throughput than BF16
      where: section 5
      value: 1.34
      unit: ratio
      conditions: {{hardware: 256 Gaudi2, model: Llama2-7B}}
      provenance: secondary
    measure: throughput_ratio
    needs: native
    of: {{precision: fp8-delayed, model.ffn: swiglu}}
    against: {{precision: bf16, model.ffn: swiglu}}
    expect: {{at_least: 1.2}}
  - id: smooth-costs-little
    paper: {{says: Smooth-SwiGLU costs about 3 % of throughput, where: a review, provenance: recalled}}
    measure: throughput_ratio
    of: {{precision: bf16, model.ffn: smooth-swiglu, ageing: none}}
    against: {{precision: bf16, model.ffn: swiglu, ageing: none}}
    expect: {{at_least: 0.9}}
notes: |
  2^16 is chosen from the format: E4M3 spans 17.8 binades, so a channel 16 binades above the rest leaves the
  rest with less than two.

  The base is trained until removing the feed-forward costs more than 0.3 nats.
"""

ENVIRONMENT: dict[str, Any] = {
    "hostname": "bench",
    "machine": "AMD EPYC 2 cores",
    "cpu": "AMD EPYC 7763",
    "num_cores": 2,
    "memory_bytes": 8 * 2**30,
    "gpu": None,
    "driver": None,
    "os": "Linux 6.1",
    "python": "3.11.2",
    "torch": "2.13.0",
    "packages": {"torch": "2.13.0", "numpy": "2.3.0", "duckdb": "2.0.1"},
    "git_commit": "0123456789abcdef",
    "details": {"load_1min": 0.4},
}


def make_plan(
    folder: Path,
    steps: int = 60,
    question: str = "Does FP8 training fail late, and does Smooth-SwiGLU repair it?",
) -> Plan:
    """The plan of the made-up case at its laptop size."""
    path = folder / "fp8_long_horizon_demo.yaml"
    text = CASE.format(
        question=json.dumps(question), tokens=steps * TOKENS_A_STEP, base_tokens=4 * steps * TOKENS_A_STEP
    )
    path.write_text(text)
    return expand(load_case(path), "laptop")


def fill(out: Path, plan: Plan, scoped_every: int = 10) -> Store:
    """Journals of all runs but one, their database, and the verdicts on them."""
    store = Store(out / "suite.duckdb")
    with store:
        for run in plan.runs:
            if _outcome(run) == "skipped":
                store.skip(request_of(run, plan), "needs more memory than this machine has")
            elif _outcome(run) != "not run":
                write_run(out, plan, run, scoped_every)
                store.ingest(out / "journals" / run.key / "1")
        store.save_verdicts([verdict.as_row() for verdict in judge(plan, store)])
    return store


def _outcome(run: PlannedRun) -> str:
    """One run of each kind of failure; the others are ok."""
    label = (
        run.labels.get("precision"),
        run.labels.get("model.ffn"),
        run.labels.get("ageing"),
        run.spec.seed,
    )
    return {
        ("fp8-delayed", "swiglu", "static-16", 2): "diverged",
        ("fp8-current", "smooth-swiglu-token", "none", 1): "oom",
        ("fp8-current", "smooth-swiglu", "none", 2): "skipped",
        ("fp8-current", "smooth-swiglu", "static-16", 0): "hung",
        ("fp8-current", "smooth-swiglu-token", "sporadic-16", 2): "not run",
    }.get(label, "ok")  # type: ignore[arg-type]


_REASONS = {
    "diverged": "loss is NaN at step 31",
    "oom": "allocating 2.1 GiB failed at step 12; peak 7.4 GiB",
    "hung": "no sign of life for 120 s at step 20",
}


def request_of(run: PlannedRun, plan: Plan) -> dict[str, Any]:
    return {
        "run_id": f"{run.key}.1",
        "key": run.key,
        "attempt": 1,
        "case": plan.case.name,
        "size": plan.size,
        "labels": run.labels,
        "role": run.role,
        "spec": run.spec.model_dump(mode="json"),
        "start_checkpoint": None,
        "resume_checkpoint": None,
        "command": f"suite run {plan.case.name} --size {plan.size}",
        "suite_version": "0.1.0",
        "auto": {"threads": {"value": 1, "reason": "runs go side by side, one thread each"}},
    }


def write_run(out: Path, plan: Plan, run: PlannedRun, scoped_every: int = 10) -> None:
    """One journal with what a real run of the case records."""
    folder = out / "journals" / run.key / "1"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps(request_of(run, plan)))
    status, steps = _outcome(run), run.spec.num_steps
    last = {"diverged": steps // 2, "oom": 12, "hung": 20}.get(status, steps)
    batch = random.Random(run.spec.seed)  # the same batches for all arms of a seed
    own = random.Random(run.key)
    emulated = run.spec.fidelity != "native"
    sporadic = run.spec.ageing.kind == "sporadic"
    plain = run.spec.model.ffn == "swiglu"
    delayed = run.spec.precision.name == "fp8-delayed"
    ffn = {"swiglu": 0.0, "smooth-swiglu": 0.001, "smooth-swiglu-token": 0.0015}[run.spec.model.ffn]
    journal = JournalWriter(folder / "rank0.journal")
    journal.start(ENVIRONMENT)
    journal.note("mfu", None, "the peak of this CPU is not known")
    journal.note("corpus_sha256", "9f" * 32, "of the text")
    journal.measure(0, {"val_loss": 2.9 if run.spec.start_from else 5.55, "num_parameters": 1_048_576.0})
    for step in range(1, last + 1):
        progress = step / steps
        start = 2.9 if run.spec.start_from else 5.55
        loss = (
            start
            - 0.5 * (1 - math.exp(-3 * progress)) * (1 if run.spec.start_from else 5.5)
            + batch.gauss(0, 0.05)
        )
        if emulated:
            loss += 0.003 + own.gauss(0, 0.002) + ffn
            if delayed and plain and run.spec.ageing.kind != "none":
                loss += (0.12 if sporadic else 0.02) * progress + own.gauss(0, 0.004)
        if status == "diverged" and step > last - 6:
            loss = 3.0 * 2.0 ** (step - last + 6) if step < last else math.nan
        step_ms = (41.0 if emulated else 24.0) + own.gauss(0, 1.5)
        journal.measure(
            step,
            {
                "loss": loss, "learning_rate": 1e-3 * (0.1 + 0.9 * math.cos(progress * math.pi / 2)),
                "step_ms": step_ms, "tokens_per_s": TOKENS_A_STEP / step_ms * 1e3,
                "gradient_norm": 0.9 + abs(own.gauss(0, 0.2)),
            },
        )  # fmt: skip
        if step % scoped_every == 0 or step == 1:
            _measure_layers(journal, run, step, progress, own)
    _measure_memory(journal, run)
    journal.measure(last, {"val_loss": 2.5, "train_seconds": last * 0.03, "mfu": None})
    journal.measure(last, {"probe_ms": 1.9 + own.random()}, "quantization")
    journal.measure(last, {"probe_ms": 0.4 + own.random() / 10}, "alignment")
    journal.end(status, _REASONS.get(status, ""))
    journal.close()


def _measure_layers(
    journal: JournalWriter, run: PlannedRun, step: int, progress: float, own: random.Random
) -> None:
    aged = run.spec.ageing.kind != "none"
    smooth = run.spec.model.ffn != "swiglu"
    for layer in range(run.spec.model.num_layers):
        journal.measure(
            step,
            {
                "alignment_cosine_max": min(1.0, 0.2 + 0.08 * layer + 0.3 * progress + own.gauss(0, 0.01)),
                "alignment_norm_product_max": 1.0 + progress,
            },
            f"layers.{layer}",
        )
        peak = (2.0**13 if aged else 18.0) / (40 if smooth else 1) * (1 + 0.1 * own.random())
        journal.measure(step, {"activation_peak_over_rms": peak}, f"layers.{layer}.ffn.hidden")
        if run.spec.precision.recipe is None:
            continue
        bad = aged and not smooth
        journal.measure(
            step, {"ffn_output_sqnr_db": (6.0 if bad else 28.0) + own.gauss(0, 1)}, f"layers.{layer}"
        )
        for part in ("attention.output", "ffn.down", "ffn.up"):
            for role in ("activations", "weights", "gradients"):
                worst = bad and part == "ffn.down" and role == "activations"
                journal.measure(
                    step,
                    {
                        "quant_flushed_fraction": (0.62 if worst else 0.0004) * own.uniform(0.8, 1.2),
                        "quant_clipped_fraction": (
                            0.003 if worst and run.spec.precision.name == "fp8-delayed" else 0.0
                        ),
                        "quant_sqnr_db": (9.0 if worst else 31.0) + own.gauss(0, 0.4),
                    },
                    f"layers.{layer}.{part}.{role}",
                )


def _measure_memory(journal: JournalWriter, run: PlannedRun) -> None:
    weights = 4.0 * 2**20
    activations = 21.0 * 2**20 * (1.15 if run.spec.fidelity != "native" else 1.0)
    parts = {"weights": weights, "gradients": weights, "optimizer": 2 * weights, "activations": activations}
    parts["temporary"] = 3.0 * 2**20
    for name, amount in (parts | {"total": sum(parts.values())}).items():
        journal.measure(run.spec.num_steps, {"peak_bytes": amount}, name)


@dataclass(frozen=True)
class Built:
    """A results folder and the site made of it."""

    out: Path
    plan: Plan
    store: Store
    index: Path

    @property
    def site(self) -> Path:
        return self.index.parent

    @property
    def case(self) -> Path:
        """The page of the only case."""
        (page,) = (self.site / "cases").glob("*.html")
        return page


def build(out: Path, steps: int = 40) -> Built:
    """Runs, database and site in `out`."""
    out.mkdir(parents=True, exist_ok=True)
    plan = make_plan(out, steps)
    store = fill(out, plan, scoped_every=steps // 2)
    return Built(out, plan, store, build_site(out, store, [plan]))


def main(arguments: Sequence[str]) -> None:
    out = Path(arguments[0])
    print(build(out, int(arguments[1]) if len(arguments) > 1 else 40).index)


if __name__ == "__main__":
    main(sys.argv[1:])
