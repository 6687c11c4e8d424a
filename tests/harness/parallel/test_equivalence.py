"""Every way of cutting a model trains as one process does, and communicates what the formulas say.

In FP64 over a few steps, where a wrong term shows at once (1e-12), and in FP32 over twenty (1e-6). Weights are
compared in FP64 alone: AdamW divides tiny gradients by their own size, so that FP32's rounding becomes a whole step of
either sign.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from harness.ledger.communication import collectives
from harness.ledger.step import Collective
from harness.spec import PrecisionSpec, QuantizerSpec, RecipeSpec, RunSpec
from tests.harness.parallel.conftest import run_ranks
from tests.harness.parallel.training import FP32, VOCAB, Trained, difference, make_spec, train

UNEVEN: dict[str, Any] = {"d_model": 36, "d_ffn": 33, "num_heads": 3, "num_kv_heads": 1, "qk_norm": True}
"""No first dimension but the embedding's divides by four: 60 rows of qkv, 66 of gate_up, 12 of the heads' norms."""
GPT: dict[str, Any] = {
    "bias": True,
    "norm": "layernorm",
    "positions": "learned",
    "ffn": "gelu",
    "tie_embeddings": True,
}
QWEN: dict[str, Any] = {"num_kv_heads": 2, "qk_norm": True}


KEPT: dict[str, Trained] = {}


def alone(spec: RunSpec) -> Trained:
    """One process; kept, since many meshes are compared with it."""
    if spec.key not in KEPT:
        KEPT[spec.key] = train(spec)
    return KEPT[spec.key]


def compare(
    mesh: dict[str, Any], loss: float = 1e-12, weights: float | None = 1e-11, **options: Any
) -> list[Trained]:
    """Train on the mesh and alone; the ranks must agree with one process and with the formula."""
    spec = make_spec(mesh, **options)
    ranks = run_ranks(spec.num_ranks, train, spec)
    one = alone(make_spec(**options))
    for rank, found in enumerate(ranks):
        apart = difference(found, one)
        assert apart["loss"] <= loss, (rank, apart)
        assert apart["norm"] <= 10 * loss, (rank, apart)
        assert weights is None or apart["weights"] <= weights, (rank, apart)
        check_collectives(spec, rank, found.collectives)
    return ranks


def check_collectives(spec: Any, rank: int, found: tuple[Collective, ...]) -> None:
    wanted = {(each.axis, each.op): each for each in collectives(spec, VOCAB, rank)}
    measured = {(each.axis, each.op): each for each in found}
    assert measured == wanted


SCHEMES: list[dict[str, Any]] = [
    *({"dp": 2}, {"dp": 2, "zero": 1}, {"dp": 2, "zero": 2}, {"dp": 2, "zero": 3}),
    *({"tp": 2}, {"tp": 2, "sequence_parallel": True}),
]
PRODUCTS: list[dict[str, Any]] = [
    {"dp": 4, "zero": 3, "replicas": 2},
    {"dp": 2, "tp": 2},
    {"dp": 2, "tp": 2, "zero": 1, "sequence_parallel": True},
    {"dp": 2, "tp": 2, "zero": 3, "sequence_parallel": True},
    {"dp": 2, "cp": 2, "zero": 3},
    {"cp": 2, "tp": 2, "sequence_parallel": True, "context": "all-gather"},
]


def name(mesh: Any) -> str:
    return "-".join(f"{axis}{size}" for axis, size in mesh.items())


@pytest.mark.parametrize("mesh", SCHEMES, ids=name)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_fp64(mesh: dict[str, Any], accumulation: int) -> None:
    compare(mesh, accumulation=accumulation)


@pytest.mark.parametrize("mesh", PRODUCTS, ids=name)
def test_products_in_fp64(mesh: dict[str, Any]) -> None:
    compare(mesh)


FOUR: list[dict[str, Any]] = [
    *({"dp": 4}, {"dp": 4, "zero": 1}, {"dp": 4, "zero": 2}, {"dp": 4, "zero": 3}, PRODUCTS[0], PRODUCTS[3]),
    *({"tp": 4}, {"tp": 4, "sequence_parallel": True}),
]


def test_experts_of_replicas() -> None:
    """One rank's experts in each replica: nothing of them to gather, dense parameters over ep."""
    mesh = {"dp": 2, "ep": 2, "zero": 3, "replicas": 2}
    options: dict[str, Any] = {"model": {"moe": {"experts": 4, "top_k": 2}}, "accumulation": 2}
    spec, one = make_spec(mesh, **options), alone(make_spec(**options))
    for rank, found in enumerate(run_ranks(4, train, spec)):
        assert max(difference(found, one).values()) < 1e-11
        assert without_tokens(found.collectives) == without_tokens(collectives(spec, VOCAB, rank))


def without_tokens(found: tuple[Collective, ...]) -> set[Collective]:
    """All but the experts' exchange of tokens, whose bytes depend on the router."""
    return {each for each in found if each.op != "all_to_all"}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", FOUR, ids=name)
def test_four_ranks_with_accumulation(mesh: dict[str, Any]) -> None:
    compare(mesh, accumulation=2)


@pytest.mark.parametrize("mesh", [*SCHEMES, PRODUCTS[0]], ids=name)
def test_fp32_over_twenty_steps(mesh: dict[str, Any]) -> None:
    compare(mesh, loss=1e-6, weights=None, precision=FP32, steps=20, optimizer={"lr": 1e-3})


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [*SCHEMES, *PRODUCTS], ids=name)
def test_fp64_over_twenty_steps(mesh: dict[str, Any]) -> None:
    compare(mesh, steps=20, optimizer={"lr": 1e-3})


@pytest.mark.slow
@pytest.mark.parametrize("mesh", PRODUCTS[1:], ids=name)
def test_products_in_fp32_over_twenty_steps(mesh: dict[str, Any]) -> None:
    compare(mesh, loss=1e-6, weights=None, precision=FP32, steps=20, optimizer={"lr": 1e-3})


@pytest.mark.parametrize(
    "mesh", [{"dp": 4, "zero": 3}, {"dp": 4, "zero": 2, "replicas": 2}, {"dp": 3, "zero": 1}], ids=name
)
def test_parts_that_do_not_divide(mesh: dict[str, Any]) -> None:
    compare(mesh, model=UNEVEN, batch_size=12)


@pytest.mark.parametrize("model", [GPT, QWEN], ids=["gpt", "qwen"])
@pytest.mark.parametrize("mesh", SCHEMES[3:], ids=name)
def test_other_models(mesh: dict[str, Any], model: dict[str, Any]) -> None:
    compare(mesh, model=model)


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("mesh", SCHEMES[3:], ids=name)
def test_recomputation(mesh: dict[str, Any], recompute: str) -> None:
    compare(mesh, recompute=recompute)


DELAYED = QuantizerSpec(format="e4m3", scaling="delayed", history=4)
FP8 = PrecisionSpec(
    name="fp8",
    compute="fp32",
    recipe=RecipeSpec(activations=DELAYED, weights=DELAYED, gradients=DELAYED),
    backend="emulated",
)
MASTER = PrecisionSpec(name="master", compute="bf16", weights="bf16", master=True)
MAIN = MASTER.model_copy(update={"main_gradients": True})
MUON = {"optimizer": {"name": "muon"}, "model": {"d_ffn": 33}}
OTHERS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"dp": 2}, {"precision": FP8}),
    ({"dp": 2, "zero": 1}, {"precision": MAIN}),
    ({"dp": 2, "zero": 2}, MUON),
    ({"dp": 2, "zero": 3}, {"precision": MASTER, **MUON}),
    ({"ep": 2, "dp": 2, "zero": 1}, {"model": {"moe": {"experts": 4, "top_k": 2}}}),
]


@pytest.mark.parametrize(("mesh", "options"), OTHERS, ids=["fp8", "main", "muon", "master", "experts"])
def test_what_optimizers_and_precisions_communicate(mesh: dict[str, Any], options: dict[str, Any]) -> None:
    spec = make_spec(mesh, steps=2, **options)
    for rank, found in enumerate(run_ranks(spec.num_ranks, train, spec)):
        assert without_tokens(found.collectives) == without_tokens(collectives(spec, VOCAB, rank))


def test_a_wrong_gradient_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison can fail: here norms' gradients are not added up over the sequence's parts."""
    monkeypatch.setattr("harness.parallel.tensor.add_up_partial", lambda gradients, mesh: None)
    with pytest.raises(AssertionError):
        compare({"tp": 2, "sequence_parallel": True})


@pytest.mark.parametrize("mesh", [{"dp": 2}, {"dp": 2, "zero": 2}, {"tp": 2}], ids=name)
def test_bf16_differs_by_its_rounding_alone(mesh: dict[str, Any]) -> None:
    compare(mesh, loss=1e-3, weights=None, precision=PrecisionSpec(name="bf16", compute="bf16"))


@pytest.mark.parametrize("zero", [0, 3])
def test_delayed_scales_are_those_of_one_process(zero: int) -> None:
    """Each rank sees a half of the batch, and the largest element is the larger of the halves'. A rank's loss is the
    mean of fewer tokens, so its output gradients are as many times larger: they are averaged later. Not to the bit,
    since a first step's casts take their scale from the rank's own tensor."""
    spec = make_spec({"dp": 2, "zero": zero}, precision=FP8, optimizer={"lr": 1e-3})
    ranks = run_ranks(2, train_and_scales, spec)
    losses, amaxes = train_and_scales(spec.model_copy(update={"parallelism": make_spec().parallelism}))
    assert ranks[0][1] == ranks[1][1]
    assert len(amaxes) == 2 * 4 * 3
    for name, amax in amaxes.items():
        wanted = 2 * amax if name.endswith("gradients") else amax
        assert ranks[0][1][name] == pytest.approx(wanted, rel=0.1), name
    assert all(abs(a - b) <= 1e-3 * b for a, b in zip(ranks[0][0], losses, strict=True))


def train_and_scales(spec: Any) -> tuple[list[float], dict[str, float]]:
    """Losses of four steps, and the first step's entry of every quantiser's history by its name."""
    from harness.precision.linear import quantizers
    from harness.tasks.pretrain import training_step
    from tests.harness.parallel.training import prepare

    torch.set_num_threads(1)
    run = prepare(spec)
    losses = []
    for step in range(1, spec.num_steps + 1):
        training_step(run, step)
        losses.append(run.loss)
    return losses, {name: float(each.amax_history[3]) for name, each in quantizers(run.model)}
