"""Traces that the formulas are held against: which, and how they are recorded.

    python tests/harness/ledger/record_traces.py        # traces what traces.json lacks, seconds to minutes each

A trace runs the real model, optimizer and wrappers on tensors without data (harness.trace). The file keeps what it
found by category, so that a test of the formulas costs nothing; another test traces some of them again.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
FILE = HERE / "traces.json"
sys.path.insert(0, str(HERE.parents[2]))

from harness.spec import OptimizerSpec, ParallelismSpec, RunSpec  # noqa: E402
from suite.declare import presets  # noqa: E402

SCHEMES = {
    "single": {},
    "ddp": {"dp": 2},
    "zero1": {"dp": 2, "zero": 1},
    "zero2": {"dp": 4, "zero": 2},
    "zero3": {"dp": 4, "zero": 3},
    "zero3 uneven": {"dp": 3, "zero": 3},
    "hsdp": {"dp": 4, "zero": 3, "replicas": 2},
    "tp": {"tp": 2},
    "tp sp": {"tp": 2, "sequence_parallel": True},
    "cp ring": {"cp": 2},
    "cp gather": {"cp": 2, "context": "all-gather"},
    "pp 1f1b": {"pp": 2},
    "pp gpipe": {"pp": 2, "schedule": "gpipe"},
    "ddp tp": {"dp": 2, "tp": 2},
    "zero3 tp sp": {"dp": 2, "zero": 3, "tp": 2, "sequence_parallel": True},
    "zero3 cp": {"dp": 2, "zero": 3, "cp": 2},
    "ddp pp": {"dp": 2, "pp": 2},
    "zero3 pp": {"dp": 2, "zero": 3, "pp": 2},
    "ddp pp tp": {"dp": 2, "pp": 2, "tp": 2},
}
ACCUMULATED = (
    ("single", 3, "full"),
    ("ddp", 2, "full"),
    ("ddp", 3, "none"),
    ("zero1", 2, "selective"),
    ("zero1", 3, "full"),
    ("zero2", 3, "selective"),
    ("zero3", 2, "full"),
    ("zero3", 3, "none"),
    ("hsdp", 2, "selective"),
    ("hsdp", 3, "full"),
    ("tp", 3, "full"),
    ("cp ring", 3, "selective"),
    ("zero3 cp", 2, "full"),
    ("zero3 cp", 3, "none"),
    ("zero3 tp sp", 3, "selective"),
)
"""(scheme, micro-steps, recomputation)."""
FSDP64: dict[str, Any] = {"dp": 64, "zero": 3}


def cases() -> list[dict[str, Any]]:
    """Every configuration, the quick ones first."""
    small = {"model": "llama-0.8m", "batch_size": 48, "seq_len": 64}
    found: list[dict[str, Any]] = []
    for name, mesh in SCHEMES.items():
        for recompute in ("none", "full"):
            found.append({**small, "precision": "bf16", "recompute": recompute, "scheme": name, "mesh": mesh})
        found.append({**small, "precision": "fp32", "recompute": "selective", "scheme": name, "mesh": mesh})
    for precision in ("bf16-pure", "bf16-master", "bf16-fp32-moments", "bf16-main-gradients", "fp16", "fp64"):
        for name in ("single", "ddp"):
            found.append({**small, "precision": precision, "scheme": name, "mesh": SCHEMES[name]})
    for precision in ("bf16-master", "bf16-fp32-moments"):
        found.append({**small, "precision": precision, "scheme": "zero3", "mesh": SCHEMES["zero3"]})
    for optimizer in ("sgd", "muon"):
        for name in ("single", "zero1", "zero3"):
            found.append({**small, "optimizer": optimizer, "scheme": name, "mesh": SCHEMES[name]})
    for name in ("single", "ddp", "zero2", "zero3"):
        found.append({**small, "accumulation": 2, "scheme": name, "mesh": SCHEMES[name]})
    for name, accumulation, recompute in ACCUMULATED:
        accumulated = {"accumulation": accumulation, "recompute": recompute, "mesh": SCHEMES[name]}
        found.append({**small, **accumulated, "scheme": name})
    tiny = {"model": "llama-0.3m", "batch_size": 12, "seq_len": 48}  # weights and buffers are most of it
    for name, accumulation, recompute in (("zero1", 3, "full"), ("hsdp", 3, "none"), ("zero3 cp", 2, "full")):
        accumulated = {"accumulation": accumulation, "recompute": recompute, "mesh": SCHEMES[name]}
        found.append({**tiny, **accumulated, "scheme": name})
    for name in ("single", "zero3"):
        found.append({**small, "kernel": "eager", "scheme": name, "mesh": SCHEMES[name]})
        found.append({**small, "model": "gpt2-124m", "batch_size": 12, "scheme": name, "mesh": SCHEMES[name]})
    long = {"seq_len": 4096}
    for recompute in ("none", "full"):
        found.append(
            {**long, "model": "llama2-7b", "batch_size": 1, "recompute": recompute, "scheme": "single"}
        )
        found.append({**long, "model": "llama2-7b", "batch_size": 64, "recompute": recompute, "mesh": FSDP64})
    found += [
        {**long, "model": "llama2-7b", "batch_size": 1, "precision": "bf16-pure"},
        {**long, "model": "qwen3-8b", "batch_size": 1, "recompute": "selective"},
        {**long, "model": "llama2-7b", "batch_size": 64, "mesh": {"dp": 64, "zero": 2}, "recompute": "full"},
        {
            **long,
            "model": "llama2-7b",
            "batch_size": 24,
            "accumulation": 3,
            "mesh": {"dp": 8, "zero": 1},
            "recompute": "full",
        },
        {
            **long,
            "model": "llama2-7b",
            "batch_size": 8,
            "mesh": {"dp": 8, "tp": 8, "zero": 3, "sequence_parallel": True},
        },
        {
            **long,
            "model": "llama3-8b",
            "batch_size": 8,
            "mesh": {"pp": 4, "microbatches": 8},
            "recompute": "full",
        },
        {
            **long,
            "model": "llama3-70b",
            "batch_size": 512,
            "mesh": {"dp": 512, "zero": 3},
            "recompute": "full",
        },
        {
            "model": "llama3-405b",
            "batch_size": 512,
            "seq_len": 8192,
            "mesh": {"dp": 512, "zero": 3, "tp": 8, "sequence_parallel": True},
            "recompute": "full",
        },
    ]
    return found


def spec_of(case: dict[str, Any]) -> RunSpec:
    optimizer = case.get("optimizer", "adamw")
    return RunSpec.model_validate(
        {
            "task": "trace",
            "model": presets("models")[case["model"]],
            "precision": presets("precisions")[case.get("precision", "bf16")],
            "optimizer": OptimizerSpec(name=optimizer),
            "parallelism": ParallelismSpec(name="custom", **case.get("mesh", {})),
            "recompute": case.get("recompute", "none"),
            "attention": {"kernel": case.get("kernel", "default")},
            "accumulation": case.get("accumulation", 1),
            "batch_size": case["batch_size"],
            "seq_len": case["seq_len"],
        }
    )


def title(case: dict[str, Any]) -> str:
    """A case in a line."""
    mesh = " ".join(f"{name}={value}" for name, value in case.get("mesh", {}).items()) or "single"
    rest = [case.get("precision", "bf16"), case.get("optimizer", "adamw"), case.get("recompute", "none")]
    extra = [f"{name}={case[name]}" for name in ("kernel", "accumulation") if name in case]
    return f"{case['model']}, {mesh}, {' '.join([*rest, *extra])}, {case['batch_size']}x{case['seq_len']}"


def recorded() -> dict[str, Any]:
    return json.loads(FILE.read_text("utf-8")) if FILE.exists() else {}


def trace(case: dict[str, Any]) -> list[dict[str, Any]]:
    """What the trace finds, rank by rank."""
    from harness.trace.ranks import trace_ranks

    return [
        {
            "rank": each.rank,
            "peak": dict(each.peak),
            "state": dict(each.state),
            "saved": each.saved,
            "flops": each.flops,
        }
        for each in trace_ranks(spec_of(case), 272)
    ]


def main() -> None:
    for case in cases():
        known = recorded()
        if title(case) in known:
            continue
        try:
            found = trace(case)
        except Exception as error:
            print(f"{title(case)}: {error!r}", file=sys.stderr)
            continue
        known[title(case)] = found
        FILE.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n", "utf-8")


if __name__ == "__main__":
    main()
