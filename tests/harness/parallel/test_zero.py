"""What ZeRO leaves on a rank, whole weights gathered from parts, and low-precision weights in parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from harness.parallel import gather, layout, zero
from harness.spec import PrecisionSpec, RunSpec
from harness.tasks.pretrain import training_step
from tests.harness.parallel.conftest import run_ranks
from tests.harness.parallel.training import FP32, difference, make_spec, prepare, train

PARAMETERS = 2 * 64 * 32 + 32 + 2 * (4 * 32 * 32 + 3 * 64 * 32 + 2 * 32)
"""Of the tiny model."""


def bytes_held(spec: RunSpec) -> dict[str, int]:
    """Local bytes after one step of weights and optimizer, and of gradients before the update."""
    run = prepare(spec)
    gradients = 0
    step = run.optimizer.step

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal gradients
        gradients = sum(gradient.nbytes for _, gradient in run.strategy.gradients())
        return step(*args, **kwargs)

    run.optimizer.step = counted  # type: ignore[method-assign]
    training_step(run, 1)
    states = [v for state in run.optimizer.state.values() for v in state.values() if v.dim()]
    return {
        "weights": sum(zero.local(p).nbytes for _, p in run.strategy.named_parameters()),
        "gradients": gradients,
        "optimizer": sum(zero.local(value).nbytes for value in states),
    }


@pytest.mark.parametrize(("stage", "kept"), [(0, (1, 1, 1)), (1, (1, 1, 2)), (2, (2, 2, 2)), (3, (2, 2, 2))])
def test_what_each_stage_shares_out(stage: int, kept: tuple[int, int, int]) -> None:
    spec = make_spec({"dp": 2, "zero": stage}, precision=FP32)
    found = run_ranks(2, bytes_held, spec)
    totals = {name: sum(each[name] for each in found) for name in found[0]}
    for name, size, parts in zip(("weights", "gradients", "optimizer"), (4, 4, 8), kept, strict=True):
        assert totals[name] == size * PARAMETERS * 2 // parts
        if name != "optimizer" or stage != 1:  # whole parameters cannot be shared out to the byte
            assert found[0][name] == found[1][name]
        assert max(each[name] for each in found) < 1.1 * totals[name] / 2


MESHES: list[dict[str, Any]] = [
    {"dp": 2, "zero": 3},
    {"tp": 2, "sequence_parallel": True},
    {"pp": 2},
    {"dp": 2, "tp": 2, "zero": 3},
]


def untrained(spec: RunSpec) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in gather.weights(prepare(spec).strategy).items()}


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_gathered_weights_are_the_model_s(mesh: dict[str, Any]) -> None:
    model = {"d_ffn": 66, "qk_norm": True}
    whole = untrained(make_spec(model=model))
    spec = make_spec(mesh, model=model)
    for found in run_ranks(spec.num_ranks, untrained, spec):
        assert list(found) == list(whole)
        assert all(torch.equal(found[name], whole[name]) for name in whole)


def bf16(**options: Any) -> PrecisionSpec:
    return PrecisionSpec(name="bf16", compute="bf16", weights="bf16", **options)


LOW: list[PrecisionSpec] = [
    *(bf16(), bf16(moments="fp32"), bf16(master=True)),
    bf16(master=True, main_gradients=True),
]


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("precision", LOW, ids=["pure", "moments", "master", "main-gradients"])
def test_bf16_weights_train_alike_in_parts(precision: PrecisionSpec, stage: int) -> None:
    """Gradients are summed in another order and rounded to BF16 in between, so within a few of its units."""
    spec = make_spec({"dp": 2, "zero": stage}, precision=precision, accumulation=2, optimizer={"lr": 1e-3})
    if precision.main_gradients and stage == 2:
        with pytest.raises(ValueError, match="main_gradients"):
            layout.check(spec)
        return
    one = train(spec.model_copy(update={"parallelism": make_spec().parallelism}))
    for found in run_ranks(2, train, spec):
        apart = difference(found, one)
        assert apart["loss"] < 1e-3 and apart["norm"] < 1e-2
        kind = next(iter(found.weights.values())).dtype
        assert kind == torch.bfloat16


def test_a_split_backward_pass_loses_gradients_under_zero_3() -> None:
    spec = make_spec({"dp": 2, "pp": 2, "zero": 3, "schedule": "zbv"}, batch_size=16, model={"num_layers": 4})
    with pytest.raises(ValueError, match="loses gradients"):
        layout.check(spec)


def skipping(spec: RunSpec) -> tuple[list[float], list[int], torch.Tensor]:
    """Rank 1 alone has a gradient that is not finite, in the second step."""
    run = prepare(spec)
    scales, skips = [], []
    gathered: dict[str, torch.Tensor] = {}
    for step in range(1, 4):
        if step == 2:
            _spoil(run)
        training_step(run, step)
        scales.append(run.scaler.get_scale())
        skips.append(run.num_skipped_steps)
        gathered = gather.weights(run.strategy)
    return scales, skips, gathered["norm.weight"].clone()


def _spoil(run: Any) -> None:
    """Make the last element of this step's local gradient of one parameter infinite, on rank 1."""
    finish = run.strategy._finish_gradients

    def spoiled() -> None:
        finish()
        run.strategy._finish_gradients = finish
        if torch.distributed.get_rank() == 1:
            dict(run.strategy.gradients())["norm.weight"][-1] = float("inf")

    run.strategy._finish_gradients = spoiled


@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_skip_an_update_together(stage: int) -> None:
    precision = PrecisionSpec(name="fp16", compute="fp16", loss_scaling="dynamic")
    spec = make_spec({"dp": 2, "zero": stage}, precision=precision, steps=3, optimizer={"lr": 1e-3})
    (scales, skips, weight), (other_scales, other_skips, other_weight) = run_ranks(2, skipping, spec)
    assert scales == other_scales == [65536.0, 32768.0, 32768.0]
    assert skips == other_skips == [0, 1, 1]
    assert torch.equal(weight, other_weight) and bool(weight.isfinite().all())
