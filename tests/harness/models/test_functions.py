"""The hand-written derivatives, against autograd of the plain formulas in FP64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from harness.models.functions import RMSNorm, SwiGLU

EPS = 1e-5


def plain_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def plain_swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up


def norm(x: Tensor, weight: Tensor) -> Tensor:
    out: Tensor = RMSNorm.apply(x, weight, EPS, x.dtype)
    return out


def fp64(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()


def gradients(out: Tensor, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    weights = torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view_as(out)
    return torch.autograd.grad((out * weights).sum(), inputs)


@pytest.mark.parametrize("shape", [(5, 8), (2, 3, 8), (2, 3, 4, 8)])
def test_rmsnorm(shape: tuple[int, ...]) -> None:
    x, weight = fp64(*shape), fp64(8, seed=1)
    got, wanted = norm(x, weight), plain_norm(x, weight)
    assert torch.allclose(got, wanted, rtol=1e-12)
    for one, other in zip(gradients(got, (x, weight)), gradients(wanted, (x, weight)), strict=True):
        assert torch.allclose(one, other, rtol=1e-11, atol=1e-12)
    assert torch.autograd.gradcheck(norm, (x, weight))


def test_rmsnorm_of_a_small_row_feels_eps() -> None:
    x, weight = (fp64(3, 8) * 1e-3).detach().requires_grad_(), fp64(8, seed=1)
    for one, other in zip(
        gradients(norm(x, weight), (x, weight)), gradients(plain_norm(x, weight), (x, weight)), strict=True
    ):
        assert torch.allclose(one, other, rtol=1e-11)


@pytest.mark.parametrize("shape", [(5, 6), (2, 3, 12)])
def test_swiglu(shape: tuple[int, ...]) -> None:
    x = fp64(*shape)
    got, wanted = SwiGLU.apply(x), plain_swiglu(x)
    assert torch.allclose(got, wanted, rtol=1e-12)
    assert torch.allclose(gradients(got, (x,))[0], gradients(wanted, (x,))[0], rtol=1e-11, atol=1e-12)
    assert torch.autograd.gradcheck(SwiGLU.apply, (x,))


def test_gate_comes_first() -> None:
    assert SwiGLU.apply(torch.tensor([0.0, 5.0])).item() == 0
    assert SwiGLU.apply(torch.tensor([5.0, 0.0])).item() == 0
    assert SwiGLU.apply(torch.tensor([40.0, -3.0])).item() == -120


def test_swiglu_gradient_may_be_a_view_and_is_left_alone() -> None:
    x = torch.randn(4, 6, requires_grad=True)
    g = torch.randn(3, 4).t()
    before = g.clone()
    SwiGLU.apply(x).backward(g)
    assert torch.equal(g, before)
    assert x.grad is not None
    assert torch.allclose(x.grad, torch.autograd.grad(plain_swiglu(x), x, g)[0], rtol=1e-5, atol=1e-6)


def test_rmsnorm_casts_its_output_alone() -> None:
    x, weight = torch.randn(16, 32, requires_grad=True), torch.randn(32, requires_grad=True)
    y = RMSNorm.apply(x, weight, EPS, torch.bfloat16)
    assert torch.equal(y, RMSNorm.apply(x, weight, EPS, torch.float32).bfloat16())
    y.sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.float32


def test_rmsnorm_of_bf16_counts_in_fp32() -> None:
    """As PyTorch's own does: the mean square of a row must not carry BF16's 8 bits."""
    x = torch.randn(256, 128, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    weight = torch.ones(128, dtype=torch.bfloat16, requires_grad=True)
    y = RMSNorm.apply(x, weight, EPS, torch.bfloat16)
    assert torch.equal(y, F.rms_norm(x, (128,), weight, EPS))
    wide = x.detach().double().requires_grad_()
    g = torch.randn(256, 128, generator=torch.Generator().manual_seed(1))
    dx, dw = torch.autograd.grad(y, (x, weight), g.bfloat16())
    wanted = torch.autograd.grad(plain_norm(wide, weight.detach().double()), wide, g.bfloat16().double())[0]
    assert dx.dtype == dw.dtype == torch.bfloat16
    assert torch.allclose(dx.double(), wanted, rtol=2**-7, atol=2**-8)
