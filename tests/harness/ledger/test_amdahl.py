"""Amdahl's law over a model's linears, against published figures and hand counts."""

from __future__ import annotations

import pytest

from harness.ledger.amdahl import (
    LayerGemm,
    flop_share,
    gemm_speedup,
    layer_gemms,
    nearest_shape,
    share_needed,
    step_speedup,
)
from harness.ledger.parameters import num_parameters
from harness.spec import ModelSpec
from suite.declare.presets import presets

MODELS = presets("models")


@pytest.mark.parametrize(("speedup", "share"), [(1.30, 0.49), (1.53, 0.73)])
def test_the_shares_that_published_speedups_need(speedup: float, share: float) -> None:
    """s = 1.9: Transformer Engine's products on H200, operands cast before."""
    assert share_needed(speedup, 1.9) == pytest.approx(share, abs=0.005)
    assert step_speedup(share_needed(speedup, 1.9), 1.9) == pytest.approx(speedup)


def test_limits_of_the_law() -> None:
    assert step_speedup(0, 2) == 1 and step_speedup(1, 2) == 2
    assert share_needed(1.5, 1.4) > 1  # a step cannot gain more than its products
    for wrong in ((-0.1, 2), (1.1, 2), (0.5, 0)):
        with pytest.raises(ValueError, match="share"):
            step_speedup(*wrong)
    for wrong in ((0.9, 2), (1.2, 1)):
        with pytest.raises(ValueError, match="above 1"):
            share_needed(*wrong)


def test_the_gemms_of_a_published_example() -> None:
    """Transformer Engine's GEMM profiling page: hidden 4096, ffn 16384, 15,872 tokens, about 19.17 TFLOP a layer."""
    model = ModelSpec(
        name="5b", num_layers=24, d_model=4096, num_heads=32, num_kv_heads=32, d_ffn=16384, ffn="gelu"
    )
    gemms = layer_gemms(model, 15872)
    assert len(gemms) == 12
    assert sum(gemm.flops for gemm in gemms) == pytest.approx(19.17e12, rel=1e-3)
    shapes = {(gemm.linear, gemm.role): gemm.shape for gemm in gemms}
    assert shapes["attention.qkv", "forward"] == (15872, 4096, 12288)
    assert shapes["attention.qkv", "dgrad"] == (15872, 12288, 4096)
    assert set(shapes["attention.qkv", "wgrad"]) == {4096, 15872, 12288}
    assert shapes["attention.qkv", "wgrad"][1] == 15872  # tokens are what a weight gradient sums over
    assert shapes["ffn.down", "forward"] == (15872, 16384, 4096)


@pytest.mark.parametrize("name", ["llama3-8b", "llama3-70b", "llama3-405b"])
def test_layer_gemms_are_all_of_the_layers_weights(name: str) -> None:
    model = MODELS[name]
    counts = num_parameters(model)
    per_token = model.num_layers * sum(gemm.flops for gemm in layer_gemms(model, 1))
    assert per_token == 6 * (counts.attention + counts.ffn)


def test_larger_models_have_more_of_their_flops_in_linears() -> None:
    shares = [flop_share(MODELS[name], 8192) for name in ("llama3-8b", "llama3-70b", "llama3-405b")]
    assert shares == sorted(shares) and shares[0] > 0.7 and shares[-1] < 1
    assert flop_share(MODELS["llama3-8b"], 8192, layers_kept=2) == pytest.approx(shares[0] * 30 / 32)
    assert flop_share(MODELS["llama3-8b"], 2048) > shares[0]  # attention takes less of a short sequence


def test_nearest_shape() -> None:
    known = [(16384, 1024, 1024), (16384, 4096, 4096), (16384, 4096, 16384)]
    assert nearest_shape((16384, 4096, 14336), known) == (16384, 4096, 16384)
    assert nearest_shape((16384, 1500, 1100), known) == (16384, 1024, 1024)
    assert nearest_shape((1, 1, 1), []) is None


def test_times_are_summed_before_they_are_divided() -> None:
    """A product with 9 of 10 parts of the FLOPs twice as fast, the other no faster: 10 / (9/2 + 1)."""
    gemms = (LayerGemm("a", "forward", 10, 10, 90), LayerGemm("b", "forward", 10, 10, 10))
    base = {gemm.shape: 1.0 for gemm in gemms}
    found = gemm_speedup(gemms, base, {(10, 10, 90): 2.0, (10, 10, 10): 1.0})
    assert found is not None and found.value == pytest.approx(10 / 5.5) and found.worst_distance == 1
    far = gemm_speedup(gemms, base, {(10, 10, 90): 2.0})
    assert far is not None and far.value == pytest.approx(2) and far.worst_distance == pytest.approx(9)
    assert gemm_speedup(gemms, base, {}) is None
