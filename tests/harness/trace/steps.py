"""Specs of tiny steps, and the same step measured and traced."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from harness.data.vocabulary import vocab_size
from harness.ledger.step import RankStep
from harness.models.moe import MoE
from harness.spec import (
    ModelSpec,
    MoESpec,
    OptimizerSpec,
    ParallelismSpec,
    PrecisionSpec,
    QuantizerSpec,
    RecipeSpec,
    RunSpec,
)
from harness.tasks.step import step
from harness.trace.rank import trace_rank

SHAPE: dict[str, Any] = {
    "name": "tiny",
    "num_layers": 2,
    "d_model": 32,
    "num_heads": 4,
    "num_kv_heads": 4,
    "d_ffn": 96,
    "max_seq_len": 64,
}
GPT: dict[str, Any] = {"ffn": "gelu", "norm": "layernorm", "positions": "learned", "bias": True}


def delayed(fmt: str, **changes: Any) -> QuantizerSpec:
    return QuantizerSpec(format=fmt, scaling="delayed", **changes)


PRECISIONS = {
    "fp32": PrecisionSpec(name="fp32"),
    "fp64": PrecisionSpec(name="fp64", compute="fp64", weights="fp64"),
    "bf16": PrecisionSpec(name="bf16", compute="bf16"),
    "bf16-pure": PrecisionSpec(name="bf16-pure", compute="bf16", weights="bf16"),
    "fp16": PrecisionSpec(name="fp16", compute="fp16", loss_scaling="dynamic"),
    "fp8": PrecisionSpec(
        name="fp8",
        compute="bf16",
        recipe=RecipeSpec(activations=delayed("e4m3"), weights=delayed("e4m3"), gradients=delayed("e5m2")),
    ),
    "mxfp8": PrecisionSpec(
        name="mxfp8",
        compute="bf16",
        recipe=RecipeSpec(
            activations=QuantizerSpec(format="e4m3", scaling="mx"),
            weights=QuantizerSpec(format="e4m3", scaling="mx"),
            gradients=QuantizerSpec(format="e4m3", scaling="mx"),
        ),
    ),
}


def make_spec(parallelism: dict[str, Any] | None = None, **changes: Any) -> RunSpec:
    """`model` and `optimizer` are changes to the usual ones; `precision` a name."""
    mesh = ParallelismSpec(**(parallelism or {}))
    model = {**SHAPE, **changes.pop("model", {})}
    if mesh.ep > 1:
        model["moe"] = MoESpec(experts=4)
    return RunSpec(
        task="step",
        model=ModelSpec(**model),
        precision=PRECISIONS[changes.pop("precision", "fp32")],
        parallelism=mesh,
        optimizer=OptimizerSpec(**changes.pop("optimizer", {})),
        **{"batch_size": 8, "seq_len": 32, **changes},
    )


class Records:
    """Stands for a journal."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, str], float | None] = {}
        self.notes: dict[str, Any] = {}

    def measure(self, step: int, values: Any, scope: str = "") -> None:
        for name, value in values.items():
            assert (name, scope) not in self.values, f"{name} of {scope} twice"
            self.values[name, scope] = value

    def note(self, name: str, value: Any, reason: str) -> None:
        self.notes[name] = value

    def beat(self) -> None: ...


def recorded(spec: RunSpec) -> Records:
    """What the task `step` writes down, on this process or on this rank of a group."""
    torch.set_num_threads(1)
    records = Records()
    if spec.model.moe is not None:
        _balance()
    step(spec, {}, records, Path(tempfile.gettempdir()))  # type: ignore[arg-type]
    return records


def _balance() -> None:
    """Send tokens to experts in turn, as a trace assumes."""
    route = MoE._route
    if getattr(route, "balanced", False):
        return

    def balanced(self: MoE, rows: Any) -> Any:
        chosen, weights, probabilities = route(self, rows)
        pairs = torch.arange(chosen.numel(), device=chosen.device) % self.moe.experts
        return pairs.view_as(chosen), weights, probabilities

    balanced.balanced = True  # type: ignore[attr-defined]
    MoE._route = balanced  # type: ignore[method-assign]


def measured(spec: RunSpec, run_ranks: Callable[..., list[Any]] | None = None) -> dict[tuple[str, str], Any]:
    """The values that the task `step` records, run on as many ranks as the spec has."""
    if spec.num_ranks == 1:
        return recorded(spec).values
    assert run_ranks is not None
    values: dict[tuple[str, str], Any] = run_ranks(spec.num_ranks, _values, spec)[0]
    return values


def _values(spec: RunSpec) -> dict[tuple[str, str], Any]:
    return recorded(spec).values


def traced(spec: RunSpec, rank: int = 0) -> RankStep:
    return trace_rank(spec, vocab_size(spec.data.tokenizer), rank)


def as_values(one: RankStep) -> dict[tuple[str, str], Any]:
    """What harness.ledger.step.record would write of one rank, under its own scopes."""
    from harness.ledger.step import record

    records = Records()
    record(records, [one])
    return {key: value for key, value in records.values.items() if key[1].startswith(f"rank{one.rank}")}
