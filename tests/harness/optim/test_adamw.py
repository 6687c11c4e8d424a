"""AdamW's schedule, its decay groups, and one step against the formula."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import nn

from harness.optim import adamw
from harness.spec import OptimizerSpec


def rates(num_steps: int = 100, **fields: object) -> list[float]:
    spec = OptimizerSpec(lr=2e-3, **fields)  # type: ignore[arg-type]
    return [adamw.learning_rate(spec, step, num_steps) for step in range(1, num_steps + 1)]


def test_warm_up_rises_linearly_to_the_rate() -> None:
    found = rates(warmup_ratio=0.1)
    assert found[:10] == pytest.approx([2e-3 * step / 10 for step in range(1, 11)])
    assert max(found) == found[9] == 2e-3


def test_cosine_ends_at_the_lowest_rate() -> None:
    found = rates(warmup_ratio=0.1, min_lr_ratio=0.1)
    assert found[-1] == pytest.approx(2e-4)
    assert found[54] == pytest.approx(2e-3 * (0.1 + 0.9 * 0.5))  # half way down after half the steps
    assert all(a > b for a, b in pairwise(found[9:]))


def test_constant_stays() -> None:
    assert set(rates(warmup_ratio=0.1, schedule="constant")[10:]) == {2e-3}


def test_no_warm_up_and_a_single_step() -> None:
    assert rates(warmup_ratio=0)[0] == pytest.approx(2e-3, rel=1e-3)
    assert rates(num_steps=1, warmup_ratio=0, min_lr_ratio=0.5) == [1e-3]
    assert rates(num_steps=1, warmup_ratio=1) == [2e-3]
    assert rates(num_steps=10, warmup_ratio=1)[-1] == 2e-3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.linspace(-1, 1, 6).view(2, 3))
        self.vector = nn.Parameter(torch.linspace(1, 2, 3))
        self.frozen = nn.Parameter(torch.ones(2, 2), requires_grad=False)


def test_matrices_decay_and_vectors_do_not() -> None:
    net = Net()
    groups = adamw.build(net, OptimizerSpec(weight_decay=0.3)).param_groups
    assert [(len(group["params"]), group["weight_decay"]) for group in groups] == [(1, 0.3), (1, 0.0)]
    assert groups[0]["params"][0] is net.matrix and groups[1]["params"][0] is net.vector


def test_steps_equal_the_formula() -> None:
    """Loshchilov & Hutter 2019, algorithm 2, in FP64."""
    spec = OptimizerSpec(lr=0.01, beta1=0.8, beta2=0.9, eps=1e-3, weight_decay=0.2)
    net = Net()
    optimizer = adamw.build(net, spec)
    theta = net.matrix.detach().double()
    m = v = torch.zeros_like(theta)
    for t in range(1, 4):
        g = torch.sin(torch.arange(6.0).view(2, 3) * t)
        net.matrix.grad = g.clone()
        optimizer.step()
        theta = theta * (1 - 0.01 * 0.2)
        m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g.double().square()
        theta = theta - 0.01 * (m / (1 - 0.8**t)) / ((v / (1 - 0.9**t)).sqrt() + 1e-3)
        assert torch.allclose(net.matrix.detach().double(), theta, rtol=1e-5)


def test_the_size_of_the_gradient_cancels() -> None:
    """A power of two in g changes no bit once eps is nothing: why ageing leaves AdamW's steps alone."""
    steps = []
    for factor in (1.0, 2.0**-10):
        net = Net()
        optimizer = adamw.build(net, OptimizerSpec(eps=1e-30))
        net.matrix.grad = torch.sin(torch.arange(6.0).view(2, 3)) * factor
        optimizer.step()
        steps.append(net.matrix.detach().clone())
    assert torch.equal(*steps)
    assert math.isfinite(float(steps[0].sum()))
