"""The emulated forward pass: exact where nothing is rounded, unbiased without ties, biased with them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_problems import measure, small

from harness.attention.arithmetic import Arithmetic, arithmetic, to_bf16
from harness.attention.problem import build
from harness.attention.statistics import bias_of
from harness.attention.tiled import exact, forward
from harness.spec import AttentionSpec

SCALE = 0.125


def _random(rows: int = 96, keys: int = 96, heads: int = 4, seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    sizes = (rows, keys, keys)
    return tuple(to_bf16(torch.randn(heads, n, 64, generator=generator)) for n in sizes)


@pytest.mark.parametrize("tile", [0, 7, 32, 96, 200])
def test_without_rounding_it_is_softmax_attention(tile: int) -> None:
    q, k, v = _random()
    found = forward(q, k, v, Arithmetic(tile=tile), scale=SCALE)
    wanted = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), scale=SCALE)
    assert torch.allclose(found.out.double(), wanted, atol=2e-6)
    assert torch.allclose(exact(q, k, v, scale=SCALE).out, wanted, atol=1e-14)
    logits = q.double() @ k.double().mT * SCALE
    assert torch.allclose(found.lse.double(), logits.logsumexp(-1, keepdim=True), atol=2e-6)


@pytest.mark.parametrize("kernel", ["paper", "code", "fp32-accumulate"])
def test_every_result_is_a_bf16_number(kernel: str) -> None:
    q, k, v = _random()
    how = arithmetic(AttentionSpec(kernel=kernel, tile=32))
    out = forward(q, k, v, how, scale=SCALE).out
    assert torch.equal(out, to_bf16(out))
    wanted = exact(q, k, v, scale=SCALE).out
    assert float((out - wanted).abs().max()) < 0.05 and not torch.equal(out, to_bf16(wanted.float()))


@pytest.mark.parametrize("kernel", ["paper", "fp32-accumulate"])
def test_without_ties_it_has_no_direction(kernel: str) -> None:
    q, k, v = _random(rows=32, keys=128, heads=64, seed=1)
    v = -v.abs()
    found = forward(q, k, v, arithmetic(AttentionSpec(kernel=kernel)), scale=SCALE)
    bias = bias_of(found.out, exact(q, k, v, scale=SCALE).out)
    assert abs(bias["attention_bias_ulp"]) < 3 * bias["attention_bias_se_ulp"]
    assert bias["attention_bias_se_ulp"] < 0.02 and bias["attention_sd_ulp"] > 0.2


@pytest.mark.parametrize(
    ("num_ties", "before"),
    [(1, 0.001), (2, -0.210), (3, -0.125), (4, -0.083), (6, -0.051), (8, -0.036), (16, -0.013)],
)
def test_ties_bias_as_an_earlier_emulation_found(num_ties: int, before: float) -> None:
    found = measure(AttentionSpec(kernel="paper", num_ties=num_ties))
    error = (0.004**2 + found["attention_bias_se_ulp"] ** 2) ** 0.5
    assert abs(found["attention_bias_ulp"] - before) < 3 * error


def test_the_gap_must_leave_something_small() -> None:
    assert abs(measure(small(gap=28))["attention_bias_ulp"]) < 0.01
    assert measure(small(gap=16))["attention_bias_ulp"] < -0.19


def test_mixed_signs_weaken_the_bias() -> None:
    pure, mixed = (measure(small(negative_share=share))["attention_bias_ulp"] for share in (1.0, 0.75))
    assert pure < mixed - 0.05 < -0.05
    positive = measure(small(negative_share=0.0))["attention_bias_ulp"]
    assert positive > 0.19, "away from zero, whatever the sign"


def test_smaller_tiles_round_more_often() -> None:
    whole, tiled = (measure(small(num_ties=8, tile=tile))["attention_bias_ulp"] for tile in (0, 32))
    assert tiled < whole - 0.1


def test_one_rounding_follows_the_values_of_the_small_weights() -> None:
    for ratio, low, high in ((1.0, -0.042, 0.042), (0.5, -0.22, -0.15), (2.0, 0.15, 0.22)):
        spec = AttentionSpec(kernel="fp32-accumulate", tied_value_ratio=ratio)
        assert low < measure(spec)["attention_bias_ulp"] < high


@pytest.mark.parametrize("error", [-5.34e-5, 5.34e-5])
def test_an_inexact_exp_of_zero_decides_every_tie(error: float) -> None:
    bias = measure(small(kernel="fp32-accumulate", exp_zero_error=error))["attention_bias_ulp"]
    assert bias * error > 0 and abs(abs(bias) - 0.208) < 0.015


def test_the_repair_removes_the_bias_and_costs_spread() -> None:
    plain, repaired = measure(small()), measure(small(beta=4.0))
    assert plain["attention_bias_ulp"] < -0.19
    assert abs(repaired["attention_bias_ulp"]) < 3 * repaired["attention_bias_se_ulp"] + 0.002
    assert repaired["attention_sd_ulp"] > plain["attention_sd_ulp"] + 0.1
    assert repaired["nan_share"] == 0


def test_a_beta_next_to_one_does_nothing() -> None:
    # exp(-m (beta - 1)) rounds to 1 where m (beta - 1) < 2^-9
    spec = small(beta=1.001, logit_low=0.25, logit_high=1.75)
    assert measure(spec)["attention_bias_ulp"] < -0.19


def test_a_large_beta_loses_rows() -> None:
    assert measure(small(beta=7.0, logit_low=20, logit_high=20)) == {"nan_share": 1.0}
    share = measure(small(beta=8.0, logit_low=0, logit_high=15))["nan_share"]
    assert abs(share - 0.17) < 3 * (0.17 * 0.83 / 640) ** 0.5


def test_the_repair_changes_nothing_in_exact_arithmetic() -> None:
    problem = build(small(logit_low=-5.0, logit_high=5.0), 0)
    plain = Arithmetic(flush_subnormals=False)
    arguments = [x.double() for x in (problem.q, problem.k, problem.v)]
    first, second = (
        forward(*arguments, how, scale=problem.scale) for how in (plain, replace(plain, beta=4.0, tile=64))
    )
    assert torch.allclose(first.out, second.out, atol=1e-12)
    assert torch.allclose(first.lse, second.lse, atol=1e-12)


def test_the_repair_moves_tied_rows_alone() -> None:
    q, k, v = _random()
    how = arithmetic(AttentionSpec(kernel="paper"))
    plain, repaired = (forward(q, k, v, each, scale=SCALE).out for each in (how, replace(how, beta=4.0)))
    assert torch.equal(plain, repaired), "random scores have no exact ties"


@pytest.mark.parametrize("kernel", ["paper", "code", "fp32-accumulate", "fp32"])
@pytest.mark.parametrize("beta", [0.0, 2.0])
def test_masked_tiles_leave_a_row_alone(kernel: str, beta: float) -> None:
    """A causal row gives the same whether the tiles it does not see are there or not, ties and all."""
    q, k, v = _random(rows=64, keys=64, heads=2, seed=3)
    k[:, 1] = k[:, 0]  # a tie in many rows
    q = q - 4 * k[:, :1]  # whose maxima are then mostly below 0, where the repair sets m to 0
    fields = {"beta": beta} if kernel != "fp32" else {}
    how = arithmetic(AttentionSpec(kernel=kernel, tile=16, **fields))
    causal = torch.ones(64, 64, dtype=torch.bool).tril()
    whole = forward(q, k, v, how, scale=SCALE, visible=causal)
    assert bool(whole.out.isfinite().all())
    for row in (0, 5, 15, 16, 40):
        seen = row // 16 * 16 + 16
        alone = forward(
            q[:, row : row + 1],
            k[:, :seen],
            v[:, :seen],
            how,
            scale=SCALE,
            visible=causal[row : row + 1, :seen],
        )
        assert torch.allclose(alone.out, whole.out[:, row : row + 1], atol=2e-2 if kernel != "fp32" else 1e-5)
        assert torch.allclose(alone.lse, whole.lse[:, row : row + 1], atol=6e-2 if kernel == "code" else 1e-2)


def test_a_row_that_sees_nothing_gets_zero() -> None:
    q, k, v = _random(rows=4, keys=8, heads=1)
    visible = torch.ones(4, 8, dtype=torch.bool)
    visible[2] = False
    for beta in (0.0, 4.0):
        found = forward(q, k, v, replace(Arithmetic(), beta=beta, tile=4), scale=SCALE, visible=visible)
        assert torch.equal(found.out[:, 2], torch.zeros(1, 64)) and bool(found.out.isfinite().all())


def test_bf16_rounds_to_nearest_even() -> None:
    x = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -(1 + 2**-8)])
    assert to_bf16(x).tolist() == [1.0, 1 + 2**-6, 1 + 2**-7, -1.0]
