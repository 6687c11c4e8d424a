"""The planned peak: of whole runs, against a measured step, and how it moves with the mesh."""

import pytest

from harness.ledger.moments import peak
from harness.ledger.parameters import num_parameters
from harness.ledger.predict import explain, predict_ranks, predict_step
from harness.ledger.states import states
from harness.spec import ModelSpec, ParallelismSpec, PrecisionSpec, RunSpec
from suite.declare import presets


def spec_of(precision: PrecisionSpec | str, model: ModelSpec | str = "llama-1m", **fields) -> RunSpec:
    model = presets("models")[model] if isinstance(model, str) else model
    precision = presets("precisions")[precision] if isinstance(precision, str) else precision
    return RunSpec(**{"model": model, "precision": precision, "tokens": 1000} | fields)


@pytest.mark.parametrize(("precision", "each"), [("fp32", 16), ("bf16-pure", 8)])
def test_model_states_dominate_a_tiny_batch(precision, each):
    """16 bytes a parameter in FP32, 8 in BF16 (weights, gradients, two moments), and a counter for each tensor."""
    spec = spec_of(precision, "llama-15m", batch_size=1, seq_len=2)
    memory = peak(spec, 272)
    count = num_parameters(spec.model, 272).total
    assert memory.total == pytest.approx(each * count, rel=0.01)
    assert memory.total == sum(memory.held.values())


@pytest.mark.parametrize(
    ("stage", "shares"), [(0, (1, 1, 1)), (1, (1, 1, 64)), (2, (64, 64, 64)), (3, (64, 64, 64))]
)
def test_zero_stages(stage, shares):
    """FSDP2 shards weights between steps in stage 2 as well: stage 2 keeps them gathered from forward to backward."""
    model = presets("models")["llama2-7b"]
    spec = spec_of("fp32", model, parallelism=ParallelismSpec(dp=64, zero=stage), batch_size=64, seq_len=2)
    lying = states(spec)
    whole = 4 * num_parameters(model).total
    assert lying.weights == pytest.approx(whole / shares[0], rel=1e-3)
    assert lying.gradients == pytest.approx(whole / shares[1], rel=1e-3)
    assert lying.optimizer == pytest.approx(2 * whole / shares[2], rel=0.3 if stage == 1 else 1e-3)


def test_zero2_keeps_what_zero3_gathers_twice():
    peaks = {}
    for stage in (2, 3):
        mesh = ParallelismSpec(dp=64, zero=stage)
        spec = spec_of("bf16", "llama2-7b", parallelism=mesh, batch_size=64, seq_len=512, recompute="full")
        peaks[stage] = peak(spec).held
    whole = 2 * num_parameters(presets("models")["llama2-7b"]).total
    assert peaks[2]["communication"] > 0.9 * whole
    assert peaks[3]["communication"] < 0.2 * whole


def test_tensor_and_pipeline_ranks_divide():
    model = presets("models")["llama3-8b"]
    spec = spec_of("fp32", model, batch_size=16, seq_len=8192)
    single = predict_step(spec)
    split = predict_step(spec.model_copy(update={"parallelism": ParallelismSpec(tp=2, pp=4)}))
    assert split.state["weights"] == pytest.approx(single.state["weights"] / 8, rel=0.2)
    assert split.saved < single.saved / 4


def test_recomputation_trades_bytes_for_operations():
    steps = {
        recompute: predict_step(spec_of("bf16", "llama2-7b", batch_size=1, seq_len=4096, recompute=recompute))
        for recompute in ("none", "selective", "full")
    }
    saved = [steps[name].saved for name in ("full", "selective", "none")]
    flops = [steps[name].flops for name in ("none", "selective", "full")]
    assert saved == sorted(saved) and flops == sorted(flops)
    assert 1.2 < flops[2] / flops[0] < 4 / 3  # the head and each layer's last product are not computed again


def test_stored_scores_grow_with_the_square_of_the_sequence():
    def scores(tokens: int) -> int:
        both = [
            predict_step(
                spec_of("bf16", batch_size=1, seq_len=tokens, attention={"kernel": kernel}), 272
            ).saved
            for kernel in ("default", "eager")
        ]
        return both[1] - both[0]

    assert scores(2048) / scores(1024) == pytest.approx(4, rel=0.05)


def test_terms_add_up():
    """What `explain` lists is what is predicted."""
    spec = spec_of("bf16", "llama2-7b", parallelism=ParallelismSpec(dp=8, zero=3), batch_size=8, seq_len=4096)
    terms, step = explain(spec), predict_step(spec)
    for category in ("weights", "gradients", "optimizer"):
        assert sum(t.num_bytes for t in terms if t.category == category) == step.state[category]
    assert sum(t.num_bytes for t in terms if t.category == "activations") == step.saved
    assert all(term.formula and term.numbers for term in terms)


def test_one_rank_of_each_kind():
    mesh = ParallelismSpec(dp=64, zero=3, tp=8, pp=8, sequence_parallel=True)
    spec = spec_of("bf16", "llama3-405b", parallelism=mesh, batch_size=1024, seq_len=8192)
    ranks = predict_ranks(spec)
    assert [each.rank for each in ranks] == [mesh.rank({"pp": stage}) for stage in range(8)]
    assert ranks[0].state["weights"] != ranks[1].state["weights"] == ranks[2].state["weights"]


@pytest.mark.parametrize(
    ("precision", "model", "shape", "tolerance"),
    [
        ("fp32", "llama-1m", (8, 128), 0.01),
        ("bf16", "llama-1m", (8, 128), 0.01),
        ("bf16-pure", "llama-2m", (4, 128), 0.01),
        ("bf16", "llama-5m", (1, 32), 0.01),
        # An emulated cast's passes hold copies that the formula estimates.
        ("fp8-delayed", "llama-1m", (8, 128), 0.3),
    ],
)
def test_measured_peaks(precision, model, shape, tolerance):
    """The whole peak of a real step, every storage followed."""
    torch = pytest.importorskip("torch")
    from harness.models import transformer
    from harness.optim import adamw
    from harness.precision.linear import apply_recipe
    from harness.run import COMPUTE_DTYPES
    from harness.trace.live import Live
    from harness.trace.lives import account

    spec = spec_of(precision, model, batch_size=shape[0], seq_len=shape[1])
    built = transformer.build(spec.model, 272, 0).to(COMPUTE_DTYPES[spec.precision.weights])
    apply_recipe(built, spec.precision)
    optimizer = adamw.build(built, spec.optimizer)
    tokens = torch.randint(0, 256, shape)
    casts = spec.precision.compute != spec.precision.weights

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=casts):
            loss = built.loss(tokens, tokens)
        loss.backward()
        optimizer.step()

    step()
    optimizer.zero_grad(set_to_none=True)
    live = Live([built], [optimizer])
    with live:
        step()
    assert peak(spec, 272).total == pytest.approx(account(live.lives).total, rel=tolerance)
