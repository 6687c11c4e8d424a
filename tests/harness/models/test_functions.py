"""The hand-written derivatives, against autograd of the plain formulas in FP64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from harness.models.functions import RMSNorm, Rotary, SwiGLU

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


def plain_rotary(qkv: Tensor, angle: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, ...]:
    """Pairs (2i, 2i + 1) of each query and key turned by `angle` [tokens, d_head / 2]."""
    q, k, v = qkv.float().split((heads, kv_heads, kv_heads), dim=2)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]

    def turned(h: Tensor) -> Tensor:
        even, odd = h[..., 0::2], h[..., 1::2]
        return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)

    return turned(q), turned(k), v


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 1)])
def test_rotary(heads: int, kv_heads: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    qkv = torch.randn(2, 5, heads + 2 * kv_heads, 6).to(dtype).requires_grad_()
    angle = torch.randn(5, 3)
    rotation = torch.polar(torch.ones_like(angle), angle)[:, None]
    got, wanted = Rotary.apply(qkv, rotation, heads, kv_heads), plain_rotary(qkv, angle, heads, kv_heads)
    weights = [torch.randn_like(part) for part in wanted]
    grads = []
    for parts in (got, wanted):
        loss = sum((part.float() * weight).sum() for part, weight in zip(parts, weights, strict=True))
        grads.append(torch.autograd.grad(loss, qkv)[0])  # type: ignore[arg-type]
    for one, other in zip(got, wanted, strict=True):
        assert torch.allclose(one.float(), other, atol=1e-5)
    assert grads[0].dtype == dtype
    assert torch.allclose(grads[0].float(), grads[1].float(), atol=1e-5 if dtype == torch.float32 else 2**-6)


def test_rotary_takes_gradients_of_one_output_alone_and_of_any_layout() -> None:
    qkv = torch.randn(2, 5, 4, 6, requires_grad=True)
    angle = torch.randn(5, 3)
    rotation = torch.polar(torch.ones_like(angle), angle)[:, None]
    g = torch.randn(2, 2, 5, 6).transpose(1, 2)  # as attention's backward hands it on
    (dq,) = torch.autograd.grad(Rotary.apply(qkv, rotation, 2, 1)[0], qkv, g)
    (wanted,) = torch.autograd.grad(plain_rotary(qkv, angle, 2, 1)[0], qkv, g)
    assert torch.allclose(dq, wanted, atol=1e-5)
    assert not dq[:, :, 2:].any()


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
    assert torch.equal(y, nn.functional.rms_norm(x, (128,), weight, EPS))
    wide = x.detach().double().requires_grad_()
    g = torch.randn(256, 128, generator=torch.Generator().manual_seed(1))
    dx, dw = torch.autograd.grad(y, (x, weight), g.bfloat16())
    wanted = torch.autograd.grad(plain_norm(wide, weight.detach().double()), wide, g.bfloat16().double())[0]
    assert dx.dtype == dw.dtype == torch.bfloat16
    assert torch.allclose(dx.double(), wanted, rtol=2**-7, atol=2**-8)
