"""Optimizers of a run: which parameters each takes, SGD's decay, FP32 copies of BF16 weights, Muon in parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness import checkpoint
from harness.optim import adamw, muon
from harness.optim.build import build, parameter_groups
from harness.optim.several import Several
from harness.optim.sgd import SGD
from harness.optim.widened import MASTER, Widened
from harness.parallel.layout import lay_out
from harness.parallel.mesh import Mesh
from harness.spec import OptimizerSpec, PrecisionSpec
from harness.tasks.pretrain import training_step
from tests.harness.parallel.conftest import run_ranks
from tests.harness.parallel.training import difference, make_spec, prepare, train


def matrix(seed: int, dtype: torch.dtype = torch.float64) -> nn.Parameter:
    generator = torch.Generator().manual_seed(seed)
    return nn.Parameter(torch.randn(6, 4, generator=generator, dtype=torch.float64).to(dtype))


def test_sgd_decays_apart_from_its_momentum() -> None:
    weight, gradients = matrix(0), [torch.randn(6, 4, dtype=torch.float64) for _ in range(3)]
    expected, velocity = weight.detach().clone(), torch.zeros(6, 4, dtype=torch.float64)
    optimizer = SGD([{"params": [weight], "weight_decay": 0.5}], lr=0.1, momentum=0.9)
    for gradient in gradients:
        weight.grad = gradient.clone()
        optimizer.step()
        velocity = 0.9 * velocity + gradient
        expected = expected * (1 - 0.1 * 0.5) - 0.1 * velocity
    torch.testing.assert_close(weight.detach(), expected, rtol=1e-14, atol=1e-14)


def test_sgd_has_no_second_moment() -> None:
    run = prepare(make_spec(optimizer={"name": "sgd"}))
    assert isinstance(run.optimizer, SGD)
    kinds = [group["weight_decay"] for group in run.optimizer.param_groups]
    assert kinds == [0.1, 0.0]
    trained = train(make_spec(optimizer={"name": "sgd"}))
    assert trained.state_bytes == sum(weight.nbytes for weight in trained.weights.values())
    assert trained.losses[-1] < trained.losses[0]


def test_muon_takes_the_blocks_matrices() -> None:
    run = prepare(make_spec(optimizer={"name": "muon"}))
    assert isinstance(run.optimizer, Several)
    of_blocks = {id(p) for name, p in run.model.named_parameters() if "layers" in name and p.dim() == 2}
    marked, *rest = parameter_groups(list(run.model.named_parameters()), run.spec.optimizer)
    assert {id(p) for p in marked["params"]} == of_blocks and marked[muon.MARK]
    assert sum(len(group["params"]) for group in rest) == len(list(run.model.parameters())) - len(of_blocks)
    for group in run.optimizer.param_groups:
        group["lr"] = 0.125
    assert all(group["lr"] == 0.125 for part in run.optimizer.parts for group in part.param_groups)


def test_muon_s_states_are_stored_and_found_again() -> None:
    """Two optimizers keep them, and each must get back its own."""
    spec = make_spec(optimizer={"name": "muon"})
    run, again = prepare(spec), prepare(spec)
    for step in (1, 2):
        training_step(run, step)
    stored = checkpoint.training_state(run.model, run.optimizer)
    slots = {name.rpartition(".")[2] for name in stored if name.startswith("optimizer.")}
    assert slots == {"momentum_buffer", "exp_avg", "exp_avg_sq", "step"}
    checkpoint.load_training_state(again.model, again.optimizer, {n: t.clone() for n, t in stored.items()})
    assert len(again.optimizer.state) == len(list(again.model.parameters()))
    for each in (run, again):
        training_step(each, 3)
    pairs = zip(run.model.parameters(), again.model.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_muon_is_pytorch_s() -> None:
    mine, theirs, gradient = matrix(1), matrix(1), matrix(2).detach()
    options = muon.options(OptimizerSpec(name="muon", lr=0.1))
    for parameter, kind in ((mine, muon.Muon), (theirs, torch.optim.Muon)):
        parameter.grad = gradient.clone()
        kind([{"params": [parameter], "weight_decay": 0.1, muon.MARK: True}], **options).step()
    assert torch.equal(mine, theirs)


@pytest.mark.parametrize("mesh", [{"dp": 2, "zero": 1}, {"dp": 3, "zero": 3}], ids=str)
def test_muon_in_parts_is_muon(mesh: dict[str, Any]) -> None:
    """Its iterations run in BF16, on the whole matrix; so FP64 gradients that differ in the last bit differ no more."""
    options: dict[str, Any] = {"optimizer": {"name": "muon"}, "model": {"d_ffn": 33}, "batch_size": 12}
    one, spec = train(make_spec(**options)), make_spec(mesh, **options)
    for found in run_ranks(spec.num_ranks, train, spec):
        assert max(difference(found, one).values()) < 1e-11


def test_muon_does_not_go_with_parts_of_matrices() -> None:
    assert muon.problem(make_spec({"dp": 2, "zero": 3}, optimizer={"name": "muon"})) is None
    reason = muon.problem(make_spec({"tp": 2}, optimizer={"name": "muon"}))
    assert reason is not None and "whole matrices" in reason


# FP32 copies


def widened(parameter: nn.Parameter, keep: bool, main: Tensor | None = None) -> Widened:
    spec = OptimizerSpec(lr=1e-3)

    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups, **adamw.options(spec))

    groups = [{"params": [parameter], "weight_decay": 0.1}]
    return Widened(groups, make, 1e-3, keep, lambda p: p.grad if main is None else main)


def test_a_master_copy_takes_updates_that_bf16_would_lose() -> None:
    reference = nn.Parameter(matrix(3, torch.bfloat16).detach().float())
    plain = torch.optim.AdamW([reference], weight_decay=0.1, **adamw.options(OptimizerSpec(lr=1e-3)))
    weight, lost = matrix(3, torch.bfloat16), matrix(3, torch.bfloat16)
    master, moments = widened(weight, keep=True), widened(lost, keep=False)
    for step in range(5):
        gradient = matrix(step, torch.bfloat16).detach()
        for parameter, optimizer in ((weight, master), (lost, moments), (reference, plain)):
            parameter.grad = gradient.to(parameter.dtype)
            optimizer.step()
    kept = master.state[weight]
    assert torch.equal(kept[MASTER], reference), "the copy goes the way of FP32 weights"
    assert torch.equal(weight, reference.to(torch.bfloat16))
    assert kept["exp_avg"].dtype == kept["exp_avg_sq"].dtype == torch.float32
    without = moments.state[lost]
    assert set(without) == {"step", "exp_avg", "exp_avg_sq"}
    assert torch.equal(without["exp_avg"], kept["exp_avg"])
    assert not torch.equal(lost, weight), "steps of a thousandth are below BF16's half unit at 1"


def test_main_gradients_are_read_where_there_are_some() -> None:
    weight, main = matrix(4, torch.bfloat16), torch.full((6, 4), 1.0 + 2**-12)
    optimizer = widened(weight, keep=True, main=main)
    weight.grad = torch.zeros(6, 4, dtype=torch.bfloat16)
    optimizer.step()
    torch.testing.assert_close(optimizer.state[weight]["exp_avg"], 0.1 * main, rtol=1e-6, atol=0)


def test_gradients_add_up_in_fp32() -> None:
    """1 + 2^-9 is no BF16 number: four of them in BF16 are 4, in FP32 they keep what is above."""
    precision = PrecisionSpec(name="x", compute="bf16", weights="bf16", master=True, main_gradients=True)
    spec = make_spec(precision=precision, accumulation=4)
    run = prepare(spec)
    (flat,) = run.strategy.flat
    parameter = run.model.norm.weight
    assert isinstance(parameter, nn.Parameter)
    for gradient in (1.0, 2.0**-9, 2.0**-9, 2.0**-9):
        (parameter * gradient).sum().backward()
    main = run.strategy.gradient(parameter)
    assert main is flat.gradient(parameter) and main is not None and main.dtype == torch.float32
    assert float(main[0]) == 1 + 3 * 2.0**-9 and parameter.grad is None


def test_states_of_copies_come_back_from_a_resume_point() -> None:
    precision = PrecisionSpec(name="x", compute="bf16", weights="bf16", master=True)
    run, other = prepare(make_spec(precision=precision)), prepare(make_spec(precision=precision, seed=5))
    from harness.tasks.pretrain import training_step

    training_step(run, 1)
    saved = checkpoint.training_state(run.model, run.optimizer)
    checkpoint.load_training_state(
        other.model, other.optimizer, {name: value.clone() for name, value in saved.items()}
    )
    for each in (run, other):
        training_step(each, 2)
    assert other.loss == run.loss
    for one, two in zip(run.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(one, two)
        assert torch.equal(run.optimizer.state[one][MASTER], other.optimizer.state[two][MASTER])


def test_adamw_of_one_process_is_the_plain_one() -> None:
    spec = make_spec()
    from harness.models import transformer

    model = transformer.build(spec.model, 64, 0)
    optimizer = build(lay_out(model, spec, Mesh(spec.parallelism, 0)))
    assert type(optimizer) is torch.optim.AdamW
    plain = adamw.build(model, spec.optimizer)
    assert [len(group["params"]) for group in optimizer.param_groups] == [
        len(group["params"]) for group in plain.param_groups
    ]


@pytest.mark.parametrize("mesh", [{"dp": 2, "zero": 1}, {"dp": 2, "zero": 2}], ids=str)
def test_sgd_in_parts(mesh: dict[str, Any]) -> None:
    options: dict[str, Any] = {"optimizer": {"name": "sgd", "lr": 0.1, "weight_decay": 0.5}}
    one = train(make_spec(**options))
    for found in run_ranks(2, train, make_spec(mesh, **options)):
        assert max(difference(found, one).values()) < 1e-12
