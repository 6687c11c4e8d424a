"""Training a tiny model on random tokens, on one process or on ranks: what the tests of equivalence compare."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from harness.ledger.step import Collective
from harness.models import transformer
from harness.optim.build import build
from harness.parallel import gather, layout, mesh, recorder
from harness.precision.backends.apply import apply_backend
from harness.precision.loss_scaling import loss_scaler
from harness.run import COMPUTE_DTYPES, Run
from harness.spec import ModelSpec, OptimizerSpec, ParallelismSpec, PrecisionSpec, RunSpec
from harness.tasks.pretrain import training_step

VOCAB = 64
TINY: dict[str, Any] = {
    "name": "tiny",
    "num_layers": 2,
    "d_model": 32,
    "num_heads": 4,
    "num_kv_heads": 4,
    "d_ffn": 64,
    "max_seq_len": 64,
}
FP64 = PrecisionSpec(name="fp64", compute="fp64", weights="fp64")
FP32 = PrecisionSpec(name="fp32")


@dataclass
class Trained:
    """What one rank has after its steps."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]
    collectives: tuple[Collective, ...]
    """Of the last step."""
    state_bytes: int
    """Of the optimizer, on this rank."""


def make_spec(parallelism: dict[str, Any] | None = None, steps: int = 4, **changes: Any) -> RunSpec:
    """A run of a tiny model in FP64; `model` and `optimizer` are changes to the usual ones."""
    model = ModelSpec(**{**TINY, **changes.pop("model", {})})
    optimizer = OptimizerSpec(**{"lr": 1e-2, "warmup_ratio": 0.0, **changes.pop("optimizer", {})})
    batch, tokens = changes.pop("batch_size", 8), changes.pop("seq_len", 16)
    return RunSpec(
        model=model,
        precision=changes.pop("precision", FP64),
        parallelism=ParallelismSpec(**(parallelism or {})),
        optimizer=optimizer,
        batch_size=batch,
        seq_len=tokens,
        tokens=steps * batch * tokens,
        **changes,
    )


class Batches:
    """Random tokens, the same for every mesh."""

    def __init__(self, spec: RunSpec) -> None:
        self._shape = spec.batch_size, spec.seq_len

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(step)
        text = torch.randint(VOCAB, (self._shape[0], self._shape[1] + 1), generator=generator)
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()


class Silent:
    """A journal that keeps nothing."""

    def measure(self, step: int, values: Any, scope: str = "") -> None: ...

    def note(self, name: str, value: Any, reason: str) -> None: ...


def prepare(spec: RunSpec) -> Run:
    """The run of this rank, ready to train."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    model = transformer.build(spec.model, VOCAB, spec.seed)
    transformer.set_recompute(model, spec.recompute)
    model.to(COMPUTE_DTYPES[spec.precision.weights])
    device = torch.device("cpu")
    apply_backend(model, spec.precision, device, spec.seed)
    laid_out = layout.lay_out(model, spec, mesh.build(spec.parallelism, rank))
    return Run(
        spec=spec,
        journal=Silent(),  # type: ignore[arg-type]
        checkpoints=Path(),
        device=device,
        model=laid_out.model,
        strategy=laid_out,
        optimizer=build(laid_out),
        scaler=loss_scaler(spec.precision, device),
        batches=Batches(spec),  # type: ignore[arg-type]
        validation=[],
    )


def train(spec: RunSpec) -> Trained:
    """All steps of `spec` on this rank."""
    torch.set_num_threads(1)
    run = prepare(spec)
    losses, norms = [], []
    found: tuple[Collective, ...] = ()
    for step in range(1, spec.num_steps + 1):
        with recorder.recording() as calls:
            training_step(run, step)
        losses.append(run.loss)
        norms.append(run.gradient_norm)
        found = recorder.collectives(calls, spec.parallelism)
    state_bytes = sum(
        getattr(value, "_local_tensor", value).nbytes
        for state in run.optimizer.state.values()
        for value in state.values()
        if torch.is_tensor(value)
    )
    whole = {name: tensor.clone() for name, tensor in gather.weights(run.strategy).items()}
    return Trained(losses, norms, whole, found, state_bytes)


def difference(one: Trained, other: Trained) -> dict[str, float]:
    """Largest relative difference of losses and norms, and of weights against the largest."""
    return {
        "loss": max(abs(a - b) / abs(b) for a, b in zip(one.losses, other.losses, strict=True)),
        "norm": max(abs(a - b) / abs(b) for a, b in zip(one.norms, other.norms, strict=True)),
        "weights": max(
            float((one.weights[name] - tensor).abs().max() / tensor.abs().max().clamp_min(1e-9))
            for name, tensor in other.weights.items()
        ),
    }
