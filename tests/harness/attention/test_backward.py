"""The backward pass against autograd and finite identities; where delta's error comes from and goes."""

from __future__ import annotations

import pytest
import torch
from attention_problems import small

from harness.attention.arithmetic import Arithmetic, arithmetic, to_bf16
from harness.attention.backward import backward, exact_gradients
from harness.attention.function import Rounding, TiledAttention
from harness.attention.problem import build
from harness.attention.statistics import delta_statistics
from harness.attention.tiled import exact, forward
from harness.spec import AttentionSpec
from harness.spec.attention import Delta

DELTAS: tuple[Delta, ...] = ("do-o", "do-o-fp64", "do-o32", "dp-p", "dp-p-fp64")


def _random(seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(2, 3, 24, 16, generator=generator, dtype=torch.float64) for _ in range(4))


def test_all_deltas_are_one_in_fp64() -> None:
    q, k, v, dout = _random()
    ideal = exact(q, k, v, scale=0.25)
    found = [exact_gradients(q, k, v, ideal, dout, scale=0.25, delta=delta) for delta in DELTAS]
    for each in found[1:]:
        assert torch.allclose(each.delta, found[0].delta, atol=1e-13, rtol=0)
        assert torch.allclose(each.dq, found[0].dq, atol=1e-13, rtol=0)


@pytest.mark.parametrize("delta", DELTAS)
def test_gradients_are_autograds(delta: Delta) -> None:
    q, k, v, dout = (x.requires_grad_() for x in _random())
    bias = torch.zeros(3, 1, 24, dtype=torch.float64)
    bias[1, :, 3:] = -2.0
    out = TiledAttention.apply(q, k, v, bias, Arithmetic(tile=7, flush_subnormals=False), delta, None)
    found = torch.autograd.grad(out, (q, k, v), dout.detach())
    causal = torch.ones(24, 24, dtype=torch.bool).tril()
    mask = torch.where(causal, bias, -torch.inf)
    plain = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    wanted = torch.autograd.grad(plain, (q, k, v), dout.detach())
    assert torch.allclose(out, plain, atol=1e-12)
    for mine, theirs in zip(found, wanted, strict=True):
        assert torch.allclose(mine, theirs, atol=1e-11)


def test_deltas_error_moves_dq_along_pk() -> None:
    """dQ_exact - dQ = scale * (delta - delta_exact) * (P K): the paper's formula, with nothing else rounded."""
    q, k, v, dout = _random()
    ideal = exact(q, k, v, scale=0.25)
    wanted = exact_gradients(q, k, v, ideal, dout, scale=0.25)
    spoilt = type(ideal)(ideal.out + 1e-3, ideal.unrounded, ideal.lse, ideal.num_ones)
    found = exact_gradients(q, k, v, spoilt, dout, scale=0.25)
    error = found.delta - wanted.delta
    assert float(error.abs().max()) > 1e-4
    assert torch.allclose(wanted.dq - found.dq, 0.25 * error * wanted.pk, atol=1e-13)


def _delta_bias(spec: AttentionSpec) -> dict[str, float]:
    problem = build(spec, 0)
    how = arithmetic(spec)
    result = forward(problem.q, problem.k, problem.v, how, scale=problem.scale)
    ideal = exact(problem.q, problem.k, problem.v, scale=problem.scale)
    arguments = (problem.q, problem.k, problem.v)
    found = backward(*arguments, result, problem.dout, how, scale=problem.scale, delta=spec.delta)
    wanted = exact_gradients(*arguments, ideal, problem.dout, scale=problem.scale)
    return delta_statistics(found, wanted, problem.x)


def test_ties_give_delta_a_sign_and_dp_p_takes_it_away() -> None:
    biased = _delta_bias(small())
    assert 0.0008 < biased["delta_bias_relative"] < 0.0016
    assert biased["delta_sign_p"] < 1e-30
    assert abs(_delta_bias(small(delta="do-o-fp64"))["delta_bias"] / biased["delta_bias"] - 1) < 1e-3
    for delta in ("do-o32", "dp-p", "dp-p-fp64"):
        repaired = _delta_bias(small(delta=delta))
        assert abs(repaired["delta_bias_relative"]) < 0.1 * biased["delta_bias_relative"]
        assert repaired["dq_relative_error"] < 0.2 * biased["dq_relative_error"]
    mixed = _delta_bias(small(gradient_negative_share=0.5))
    assert abs(mixed["delta_bias_relative"]) < 0.3 * biased["delta_bias_relative"]


def test_one_sign_makes_the_errors_add_up() -> None:
    one, mixed = (_delta_bias(small(gradient_negative_share=share))["coherence"] for share in (1.0, 0.5))
    assert one > 3 * mixed and mixed < 0.15


def test_the_watch_sees_what_rounding_did() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 2, 16, 8, generator=generator).requires_grad_() for _ in range(3))
    seen: list[Rounding] = []
    how = arithmetic(AttentionSpec(kernel="paper"))
    out = TiledAttention.apply(q, k, v, None, how, "do-o", seen.append)
    out.sum().backward()
    assert torch.equal(out, to_bf16(out))
    assert len(seen) == 1 and seen[0].delta_error.shape == (2, 2, 16, 1) and seen[0].pk.shape == (2, 2, 16, 8)
    assert 0 < float(seen[0].delta_error.abs().max()) < 0.2
    assert q.grad is not None and bool(q.grad.isfinite().all())


def test_the_output_holds_no_graph_of_its_own() -> None:
    import gc
    import weakref

    q = torch.randn(1, 1, 8, 8, requires_grad=True)
    out = TiledAttention.apply(q, q, q, None, arithmetic(AttentionSpec(kernel="paper")), "do-o", None)
    gc.disable()
    try:
        alive = weakref.ref(out)
        del out
        assert alive() is None, "freed by counting references alone"
    finally:
        gc.enable()
