"""Experts dealt out over ranks train as on one process, whatever the routing, and send what the formula says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from harness.ledger.communication import collectives
from harness.ledger.step import Collective
from harness.ledger.traffic.base import summed
from harness.ledger.traffic.experts import Routing
from harness.ledger.traffic.experts import experts as traffic
from harness.models.transformer import build, set_recompute
from harness.parallel import gather, recorder
from harness.parallel import mesh as meshes
from harness.parallel.layout import lay_out
from harness.parallel.strategy import Strategy
from harness.spec import MoESpec, ParallelismSpec, PrecisionSpec, RunSpec
from tests.harness.models.conftest import spec as tiny
from tests.harness.parallel.conftest import run_ranks

VOCAB, EXPERTS, STEPS = 61, 4, 20
DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
TOLERANCE = {"fp32": 1e-6, "fp64": 1e-12}


def spec(
    dtype: str = "fp64", batch: int = 4, moe: dict[str, Any] | None = None, **parallelism: Any
) -> RunSpec:
    accumulation = parallelism.pop("accumulation", 1)
    recompute = parallelism.pop("recompute", "none")
    return RunSpec(
        model=tiny(moe=MoESpec(experts=EXPERTS, **(moe or {})), max_seq_len=8),
        precision=PrecisionSpec(name=dtype, compute=dtype, weights=dtype),  # type: ignore[arg-type]
        parallelism=ParallelismSpec(**parallelism),
        tokens=1,
        batch_size=batch,
        seq_len=8,
        accumulation=accumulation,
        recompute=recompute,
    )


def batch(step: int, spec: RunSpec) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCAB, (spec.batch_size, spec.seq_len + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def made(spec: RunSpec) -> Strategy:
    """This rank's part of the model; routers are given a lean, so that loads are uneven."""
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    net = build(spec.model, VOCAB, 0).to(DTYPES[spec.precision.weights])
    with torch.no_grad():
        for mixture in net.mixtures():
            mixture.router.weight[0] += 0.05
            mixture.router.weight.mul_(20)
    set_recompute(net, spec.recompute)
    return lay_out(net, spec, meshes.build(spec.parallelism, rank))


def train(
    spec: RunSpec,
) -> tuple[list[float], dict[str, Tensor], list[Tensor], tuple[Collective, ...], list[int]]:
    """Losses of 20 steps, the gradient of the first, the last step's loads, the second step's collectives, and how many
    pairs came to this rank's experts in it, by layer."""
    strategy = made(spec)
    before = {name: each.clone() for name, each in gather.weights(strategy).items()}
    plain = torch.optim.SGD([p for _, p in strategy.named_parameters()], lr=1.0)
    adam = torch.optim.AdamW([p for _, p in strategy.named_parameters()], lr=1e-3)
    curve, gradient, calls, came = [], {}, (), []
    for step in range(STEPS):
        with recorder.recording() as seen:
            mean, _ = strategy.agree(strategy.forward_backward(*batch(step, spec)))
            (adam if step else plain).step()
            strategy.end_step()
            for part in strategy.parts:
                part.end_step()
        if step == 0:
            gradient = {name: before[name] - now for name, now in gather.weights(strategy).items()}
        if step == 1:
            calls = recorder.collectives(seen, spec.parallelism)
            first = strategy.mesh.place["ep"] * EXPERTS // spec.parallelism.ep
            here = slice(first, first + EXPERTS // spec.parallelism.ep)
            came = [int(layer.last[1][here].sum()) for layer in strategy.model.mixtures()]  # type: ignore[index]
        curve.append(float(mean))
    loads = [layer.last for layer in strategy.model.mixtures() if layer.last is not None]
    return curve, gradient, loads, calls, came


OPTIONS = {
    "dropless": {"aux_loss": 0.1},
    "capacity": {"capacity_factor": 1.0, "bias_update": 0.01},
    "top-1": {"top_k": 1},
}


@pytest.mark.parametrize(
    ("dtype", "moe", "mesh"),
    [
        ("fp64", "dropless", {"ep": 2}),
        ("fp64", "capacity", {"ep": 2}),
        ("fp32", "dropless", {"ep": 2}),
        ("fp64", "top-1", {"ep": 2, "zero": 3}),
        ("fp64", "dropless", {"dp": 2}),
        ("fp64", "capacity", {"dp": 2, "zero": 3}),
        ("fp64", "dropless", {"cp": 2}),
        pytest.param("fp64", "dropless", {"dp": 2, "ep": 2}, marks=pytest.mark.slow),
        pytest.param("fp32", "capacity", {"dp": 2, "ep": 2}, marks=pytest.mark.slow),
        pytest.param("fp64", "dropless", {"dp": 2, "ep": 2, "zero": 3}, marks=pytest.mark.slow),
        pytest.param("fp64", "capacity", {"dp": 2, "ep": 2, "zero": 2}, marks=pytest.mark.slow),
        pytest.param("fp64", "dropless", {"ep": 2, "cp": 2}, marks=pytest.mark.slow),
        pytest.param("fp64", "top-1", {"ep": 4}, marks=pytest.mark.slow),
    ],
)
def test_a_mixture_over_ranks_trains_as_on_one(dtype: str, moe: str, mesh: dict[str, int]) -> None:
    tolerance = TOLERANCE[dtype]
    curve, gradient, loads, _, _ = train(spec(dtype, moe=OPTIONS[moe]))
    assert any(float(load[0].max() / load[0].mean()) > 1.3 for load in loads), "loads must be uneven"
    over = spec(dtype, moe=OPTIONS[moe], **mesh)
    for found, theirs, others, _, _ in run_ranks(over.num_ranks, train, over):
        assert found == pytest.approx(curve, rel=tolerance, abs=0)
        assert theirs.keys() == gradient.keys()
        for name, right in gradient.items():
            error = float((theirs[name] - right).abs().max())
            assert error <= tolerance * max(float(right.abs().max()), 0.01), name
        for mine, right in zip(others, loads, strict=True):
            torch.testing.assert_close(mine, right, rtol=0, atol=1e-4)


@pytest.mark.parametrize("moe", ["dropless", "capacity"])
def test_microbatches_of_a_pipeline_are_micro_steps_to_the_auxiliary_loss(moe: str) -> None:
    """f is of a micro-step, so two microbatches train as two micro-steps do; the loss's gradient also reaches the stage
    that sees no cross-entropy."""
    curve, gradient, _, _, _ = train(spec(moe=OPTIONS[moe], accumulation=2))
    over = spec(moe=OPTIONS[moe], pp=2, microbatches=2)
    for found, theirs, *_ in run_ranks(2, train, over):
        assert found == pytest.approx(curve, rel=1e-12, abs=0)
        for name, right in gradient.items():
            assert float((theirs[name] - right).abs().max()) <= 1e-12 * max(float(right.abs().max()), 0.01), (
                name
            )


@pytest.mark.parametrize(
    ("options", "mesh"),
    [
        ({"aux_loss": 0.1}, {"ep": 2, "accumulation": 2}),
        ({"top_k": 1}, {"ep": 2, "recompute": "full"}),
        pytest.param({"aux_loss": 0.1}, {"dp": 2, "ep": 2, "zero": 3}, marks=pytest.mark.slow),
        pytest.param({"top_k": 1}, {"ep": 4}, marks=pytest.mark.slow),
    ],
)
def test_bytes_are_the_formula_s(options: dict[str, Any], mesh: dict[str, Any]) -> None:
    over = spec(moe=options, **mesh)
    assert over.model.moe is not None
    tokens = over.batch_size * over.seq_len // over.parallelism.data_shards
    sent = tokens * over.model.moe.top_k * over.model.num_layers
    whole, uniform = 0, 0
    for rank, (_, _, _, calls, came) in enumerate(run_ranks(over.num_ranks, train, over)):
        found = {each for each in calls if (each.axis, each.op) != ("ep", "all_to_all")}
        assert found == {each for each in collectives(over, VOCAB, rank) if each.op != "all_to_all"}
        (mine,) = set(calls) - found
        whole += mine.num_bytes
        uniform += summed_all_to_all(over, rank, None)
        if over.num_ranks == over.parallelism.ep:  # then `came` is of this rank alone
            exact = summed_all_to_all(over, rank, Routing(sent, sum(came)))
            assert mine.num_bytes == exact
    assert whole == uniform, "what one rank sends another receives"


def summed_all_to_all(over: RunSpec, rank: int, routing: Routing | None) -> int:
    found = summed(traffic(over, VOCAB, rank, routing))
    return sum(each.num_bytes for each in found if each.op == "all_to_all")
