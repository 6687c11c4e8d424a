"""FLOPs against published figures and against PyTorch's own counter."""

import pytest

from harness.ledger.flops import forward_flops_per_token, run_flops, train_flops_per_token
from harness.ledger.parameters import num_parameters
from harness.spec import ModelSpec, PrecisionSpec, RunSpec
from suite.declare import presets


def test_published_figures():
    """Llama 3 8B at 8,192: 5.8e10 a token, without a causal discount (torchtitan's formula)."""
    assert train_flops_per_token(presets("models")["llama3-8b"], 8192) == pytest.approx(5.8e10, rel=0.005)
    # Llama 3 405B on 15.6T tokens: the paper's 3.8e25 is 6 N alone, all parameters counted.
    llama = presets("models")["llama3-405b"]
    assert 6 * num_parameters(llama).total * 15.6e12 == pytest.approx(3.8e25, rel=0.005)
    assert train_flops_per_token(llama, 8192) * 15.6e12 == pytest.approx(3.8e25, rel=0.1)


def test_matmul_weights_are_all_but_embeddings_and_vectors():
    model = presets("models")["llama2-7b"]
    parts = num_parameters(model)
    assert parts.matmul == parts.total - parts.embedding - parts.norms
    tied = presets("models")["gpt2-124m"]
    biases = 12 * (3 * 768 + 768 + 3072 + 768)
    parts = num_parameters(tied)
    assert parts.matmul == parts.total - parts.positions - parts.norms - biases


def test_causal_halves_attention_alone():
    model = presets("models")["llama3-8b"]
    full, causal = (train_flops_per_token(model, 8192, causal=c) for c in (False, True))
    assert full - causal == 6 * 32 * 4096 * 8192
    assert forward_flops_per_token(model, 8192) == full // 3


@pytest.mark.parametrize("ffn", ["swiglu", "gelu"])
def test_pytorch_counts_the_same(ffn):
    torch = pytest.importorskip("torch")
    from torch.utils.flop_counter import FlopCounterMode

    from harness.models.transformer import build

    model = ModelSpec(name="m", num_layers=2, d_model=64, num_heads=2, num_kv_heads=2, d_ffn=96, ffn=ffn)
    tokens = torch.randint(0, 50, (2, 32))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        build(model, 50, 0)(tokens)
    attention_square = (
        4 * 2 * 2 * 32 * 32
    )  # a token's forward share, in case the counter skips the fused kernel
    counted = counter.get_total_flops() / tokens.numel()
    ours = forward_flops_per_token(model, 32, 50)
    assert counted in (pytest.approx(ours), pytest.approx(ours - attention_square))


def test_a_whole_run():
    model = ModelSpec(
        name="m", num_layers=1, d_model=32, num_heads=1, num_kv_heads=1, d_ffn=32, vocab_size=50
    )
    spec = RunSpec(
        model=model, precision=PrecisionSpec(name="p"), tokens=1000, batch_size=8, seq_len=16, val_tokens=0
    )
    each = train_flops_per_token(model, 16)
    assert run_flops(spec) == 8 * 8 * 16 * each  # 7.8 steps, rounded up
    with_validation = spec.model_copy(update={"val_tokens": 300})
    assert run_flops(with_validation) - run_flops(spec) == 2 * 300 * (each // 3)
