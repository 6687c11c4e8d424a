"""The gradients probe on ranks: it counts the elements of its own rank's part, wherever they lie."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness.parallel import zero
from harness.probes.base import ProbeSet, RunContext
from harness.spec import PrecisionSpec, RunSpec
from harness.tasks.pretrain import training_step
from tests.harness.parallel.conftest import run_ranks
from tests.harness.parallel.training import FP32, make_spec, prepare

MAIN = PrecisionSpec(name="main", compute="bf16", weights="bf16", master=True, main_gradients=True)


class Kept:
    """The last values, in memory."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}

    def measure(self, step: int, values: dict[str, float], scope: str = "") -> None:
        self.values |= values

    def note(self, name: str, value: Any, reason: str) -> None: ...


def broken(spec: RunSpec) -> tuple[dict[str, float], int]:
    """What the probe says of a step whose gradients are all NaN, and the elements of this rank's part."""
    run, kept = prepare(spec), Kept()
    with torch.no_grad():
        for _, parameter in run.strategy.named_parameters():
            zero.local(parameter).fill_(math.nan)
    probes = ProbeSet(
        RunContext(
            spec=spec,
            model=run.model,
            optimizer=run.optimizer,
            device=run.device,
            record=kept,  # type: ignore[arg-type]
            strategy=run.strategy,
            rank=dist.get_rank(),
            train_step=lambda step: None,
            validation_loss=lambda: 0.0,
        )
    )
    probes.begin()
    probes.before_step(1)
    training_step(run, 1, probes)
    size = sum(zero.local(parameter).numel() for _, parameter in run.strategy.named_parameters())
    return kept.values, size


@pytest.mark.parametrize(
    ("mesh", "precision"),
    [({"dp": 2, "zero": 3}, FP32), ({"dp": 2}, MAIN), ({"pp": 2}, FP32)],
    ids=["zero 3", "main gradients", "pipeline"],
)
def test_gradients_that_are_not_finite(mesh: dict[str, Any], precision: PrecisionSpec) -> None:
    spec = make_spec(mesh, steps=1, precision=precision, probes={"gradients": 1})
    (found, size), (others, _) = run_ranks(2, broken, spec)
    assert math.isnan(found["gradient_norm"])
    assert 0.9 * size < found["num_nonfinite_gradients"] <= size, "tokens that are not there have no gradient"
    assert others == {}
