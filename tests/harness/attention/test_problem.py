"""The tied problem: scores are what the spec says, exactly, in BF16 inputs."""

from __future__ import annotations

import pytest
import torch
from attention_problems import small
from pydantic import ValidationError

from harness.attention.arithmetic import to_bf16
from harness.attention.problem import build
from harness.attention.statistics import sign_test, ulp
from harness.spec import AttentionSpec


@pytest.mark.parametrize(
    "fields", [{}, {"num_ties": 3, "gap": 20.25}, {"logit_low": -5.0, "logit_high": -1.0}]
)
def test_scores_are_exact(fields: dict[str, float]) -> None:
    spec = small(**fields)
    problem = build(spec, 0)
    for tensor in (problem.q, problem.k, problem.v, problem.dout):
        assert torch.equal(tensor, to_bf16(tensor)), "a BF16 kernel gets the same numbers"
    s = problem.q @ problem.k.mT * problem.scale
    assert torch.equal(s.double(), problem.q.double() @ problem.k.double().mT * problem.scale)
    top = s.amax(-1, keepdim=True)
    assert torch.equal((s == top).sum(-1), torch.full(s.shape[:2], spec.num_ties))
    below = (top - s)[s < top]
    assert float(below.min()) == spec.gap and float(below.max()) == spec.gap + spec.spread
    assert spec.logit_low <= float(top.min()) and float(top.max()) <= spec.logit_high
    assert float(top.std()) > 0.1


def test_values_are_as_asked() -> None:
    spec = small(negative_share=0.75, tied_value_ratio=0.25)
    problem = build(spec, 0)
    assert abs(float((problem.v < 0).double().mean()) - 0.75) < 0.01
    tied = (problem.k[..., -4] != 0)[..., None].expand_as(problem.v)
    assert float(problem.v[tied].abs().max()) <= 0.5 <= float(problem.v[~tied].abs().min())
    again = build(spec, 0)
    assert torch.equal(problem.v, again.v) and torch.equal(problem.q, again.q)
    assert not torch.equal(problem.v, build(spec, 1).v)


def test_impossible_problems_are_refused() -> None:
    for fields, text in (
        ({"num_ties": 33, "num_queries": 32, "num_keys": 1024}, "must not exceed num_keys"),
        ({"d_head": 16, "num_queries": 16}, "at most d_head"),
        ({"logit_low": 2.0, "logit_high": 1.0}, "above logit_high"),
        ({"kernel": "flash", "beta": 2.0}, "repair"),
        ({"kernel": "flash", "inject_ties": 2}, "emulated kernel"),
    ):
        with pytest.raises(ValidationError, match=text):
            AttentionSpec(**fields)  # type: ignore[arg-type]


def test_ulp_is_bf16s_spacing() -> None:
    x = torch.tensor([1.0, 1.99, 2.0, -4.7, 2.0**-126, 2.0**-130], dtype=torch.float64)
    assert ulp(x).tolist() == [2.0**-7, 2.0**-7, 2.0**-6, 2.0**-5, 2.0**-133, 2.0**-133]
    bits = x[:4].to(torch.bfloat16)
    upper = torch.nextafter(bits.abs(), torch.full_like(bits, torch.inf)).double()
    assert torch.equal(upper - bits.abs().double(), ulp(bits.double()))


def test_the_sign_test_is_binomial() -> None:
    assert sign_test(5, 5) == 1.0 and sign_test(0, 0) == 1.0
    assert sign_test(10, 0) == pytest.approx(2 / 1024)
    assert sign_test(8, 2) == pytest.approx(2 * (45 + 10 + 1) / 1024)
    assert sign_test(2, 8) == sign_test(8, 2)
    assert sign_test(1100, 901) == pytest.approx(9.5e-6, rel=0.1), "normal beyond a thousand signs"
