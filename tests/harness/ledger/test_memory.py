"""Predicted bytes against the formulas' sources and against a measured step."""

import pytest

from harness.ledger.memory import predict_memory
from harness.ledger.parameters import num_parameters
from harness.spec import ModelSpec, ParallelismSpec, PrecisionSpec, RunSpec
from suite.declare import presets


def spec_of(precision: PrecisionSpec, model: ModelSpec | str = "llama-1m", **fields) -> RunSpec:
    model = presets("models")[model] if isinstance(model, str) else model
    return RunSpec(**{"model": model, "precision": precision, "tokens": 1000} | fields)


def test_model_states():
    """16 bytes a parameter in FP32, 8 in BF16 (weights, gradients, two moments), at the update."""
    for name, each in (("fp32", 16), ("bf16-pure", 8)):
        memory = predict_memory(
            spec_of(presets("precisions")[name], "llama-15m", batch_size=1, seq_len=2), 272
        )
        count = num_parameters(presets("models")["llama-15m"], 272).total
        assert memory.moment == "update"
        assert memory.total == each * count
        assert memory.as_dict()["total"] == memory.total


@pytest.mark.parametrize(
    ("stage", "shares"), [(0, (1, 1, 1)), (1, (1, 1, 64)), (2, (1, 64, 64)), (3, (64, 64, 64))]
)
def test_zero_stages(stage, shares):
    """Each stage divides one more of the model states by dp (ZeRO, figure 1); 7B on 64 ranks."""
    model = presets("models")["llama2-7b"]
    mesh = ParallelismSpec(dp=64, zero=stage)
    spec = spec_of(PrecisionSpec(name="p"), model, parallelism=mesh, batch_size=64, seq_len=2)
    memory = predict_memory(spec)
    state = 4 * num_parameters(model).total
    assert memory.weights == pytest.approx(state / shares[0], abs=1)
    assert memory.optimizer == pytest.approx(2 * state / shares[2], abs=1)
    if memory.moment == "update":
        assert memory.gradients == pytest.approx(state / shares[1], abs=1)


def test_tensor_and_pipeline_ranks_divide_states_and_layers():
    model = presets("models")["llama3-8b"]
    spec = spec_of(PrecisionSpec(name="p"), model, batch_size=16, seq_len=8192)
    single = predict_memory(spec)
    split = predict_memory(spec.model_copy(update={"parallelism": ParallelismSpec(tp=2, pp=4)}))
    assert split.weights == pytest.approx(single.weights / 8, abs=8)
    # The head is divided by tp alone.
    assert single.activations / 8 < split.activations < single.activations / 2


def test_activations_grow_with_tokens_and_layers():
    base = predict_memory(spec_of(PrecisionSpec(name="p")), 272)
    twice = predict_memory(spec_of(PrecisionSpec(name="p"), batch_size=16), 272)
    assert twice.activations == pytest.approx(2 * base.activations, rel=1e-6)
    assert twice.weights == base.weights


@pytest.mark.parametrize(
    ("precision", "model", "shape", "tolerance"),
    [
        ("fp32", "llama-1m", (8, 128), 0.1),
        ("bf16", "llama-1m", (8, 128), 0.1),
        ("bf16-pure", "llama-2m", (4, 128), 0.1),
        ("bf16", "llama-5m", (1, 32), 0.1),
        # An emulated cast's passes may be fused one day, which would save memory.
        ("fp8-delayed", "llama-1m", (8, 128), 0.3),
    ],
)
def test_measured_peaks(precision, model, shape, tolerance):
    """The whole peak of a real step, as PyTorch's MemTracker sees it."""
    torch = pytest.importorskip("torch")
    from harness.models import transformer
    from harness.optim import adamw
    from harness.precision.linear import apply_recipe
    from harness.probes.memory import measure_step
    from harness.run import COMPUTE_DTYPES

    spec = spec_of(presets("precisions")[precision], model, batch_size=shape[0], seq_len=shape[1])
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
    measured, _ = measure_step(built, optimizer, torch.device("cpu"), step)
    assert predict_memory(spec, 272).total == pytest.approx(measured["total"], rel=tolerance)
