"""What a mixture keeps for the backward pass: by formula, and as autograd is seen to keep it."""

import weakref

import pytest

from harness.ledger.mixture import mixture_copies, mixture_terms, pairs_computed
from harness.ledger.terms import total
from harness.ledger.widths import widths
from harness.spec import ModelSpec, MoESpec, ParallelismSpec, PrecisionSpec, RunSpec

torch = pytest.importorskip("torch")
BATCH, TOKENS = 2, 8


class Kept:
    """A tensor that autograd keeps, for as long as it does."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach()  # a saved output would keep its own node alive
        self.storage = tensor.untyped_storage()


def run(compute: str, weights: str, **moe: float) -> RunSpec:
    model = ModelSpec(
        name="m",
        num_layers=1,
        d_model=32,
        num_heads=2,
        num_kv_heads=2,
        d_ffn=48,
        moe=MoESpec(experts=4, **moe),
    )
    precision = PrecisionSpec(name="p", compute=compute, weights=weights)
    return RunSpec(
        task="ledger",
        model=model,
        precision=precision,
        parallelism=ParallelismSpec(),
        batch_size=BATCH,
        seq_len=TOKENS,
    )


@pytest.mark.parametrize(
    "precision", [("fp32", "fp32"), ("bf16", "fp32"), ("bf16", "bf16"), ("fp64", "fp64")]
)
@pytest.mark.parametrize(
    "moe", [{}, {"aux_loss": 0.1, "bias_update": 0.1}, {"top_k": 1}, {"capacity_factor": 1.0}]
)
def test_kept_bytes_are_the_formula_s(precision: tuple[str, str], moe: dict[str, float]) -> None:
    from harness.models.moe import MoE
    from harness.run import COMPUTE_DTYPES

    compute, weights = (COMPUTE_DTYPES[name] for name in precision)
    spec = run(*precision, **moe)
    layer = MoE(spec.model)
    generator = torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator).to(weights)
    x = torch.randn(BATCH, TOKENS, 32, generator=generator).to(compute).requires_grad_()
    own = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
    kept: weakref.WeakSet[Kept] = weakref.WeakSet()

    def keep(tensor: torch.Tensor) -> Kept:
        kept.add(found := Kept(tensor))
        return found

    narrow = torch.autocast("cpu", compute, enabled=compute != weights)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda found: found.tensor), narrow:
        out = layer(x).sum()
    assert out.requires_grad  # the graph is alive, and what no gradient goes through is not
    storages = {found.storage.data_ptr(): found.storage for found in kept}
    w = widths(spec, 272)
    formula = total(mixture_terms(spec, w)) + total(mixture_copies(spec, w))
    found = sum(storage.nbytes() for pointer, storage in storages.items() if pointer not in own)
    if moe.get("capacity_factor"):  # how many pairs are dropped is for the router to say
        taken = int(layer.tally[1].sum())  # type: ignore[index]
        balanced = pairs_computed(spec, w)
        element = torch.empty((), dtype=compute).element_size()
        formula += (taken - balanced) * (32 + 4 * 48) * element
        assert taken < balanced
    assert found == formula


@pytest.mark.parametrize(
    ("precision", "moe", "more"),
    [
        (("bf16", "fp32"), {"aux_loss": 0.1, "bias_update": 0.1}, {}),
        (("fp32", "fp32"), {"capacity_factor": 1.25}, {"recompute": "full"}),
        (("bf16", "fp32"), {}, {"parallelism": ParallelismSpec(ep=2, zero=3)}),
    ],
)
def test_the_peak_is_the_traced_one(
    precision: tuple[str, str], moe: dict[str, float], more: dict[str, object]
) -> None:
    """In bytes kept but for the step's tallies and the loss, at the peak within a hundredth."""
    from harness.ledger.predict import predict_step
    from harness.trace.rank import trace_rank

    small = run(*precision, **moe)
    shape = {"num_layers": 2, "d_model": 96, "num_heads": 3, "num_kv_heads": 3, "d_ffn": 128}
    spec = small.model_copy(
        update={"model": small.model.model_copy(update=shape), "batch_size": 8, "seq_len": 64, **more}
    )
    formula, traced = predict_step(spec, 272, 0), trace_rank(spec, 272)
    assert dict(formula.state) == dict(traced.state)
    assert 0 <= traced.saved - formula.saved <= 2 * 24 * 4 + 8
    assert formula.total == pytest.approx(traced.total, rel=0.01)
    assert set(formula.collectives) == set(traced.collectives)
