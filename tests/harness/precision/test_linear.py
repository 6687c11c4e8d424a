"""The three GEMMs of a quantised linear: what they multiply; without quantisers they are nn.Linear's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from harness.precision.linear import Linear, QuantizedLinear
from harness.precision.operands import Operand
from harness.precision.scaling import Quantizer
from harness.spec import PrecisionSpec

from .conftest import Array, dequantize, recipe

D_IN, D_OUT = 40, 24


class Identity(nn.Module):
    """A quantiser that changes nothing."""

    def cast(self, x: Tensor, along: int, compute: torch.dtype) -> Operand:
        return Operand(x.to(compute), torch.ones(()))


class Tagged(nn.Module):
    """Returns the number of its role everywhere: the products then tell which operands they had."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value
        self.seen: list[Tensor] = []

    def cast(self, x: Tensor, along: int, compute: torch.dtype) -> Operand:
        self.seen.append(x)
        return Operand(torch.full_like(x, self.value, dtype=torch.float32), None)


def layer(compute: str = "fp32", bias: bool = False, **more: Any) -> QuantizedLinear:
    torch.manual_seed(0)
    precision = PrecisionSpec(name="fp8", compute=compute, recipe=recipe(**more))  # type: ignore[arg-type]
    return QuantizedLinear(Linear(D_IN, D_OUT, bias=bias), precision)


def run(module: nn.Module, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(output, gradient of x, gradient of the weight) for the output gradient `g`."""
    x = x.clone().requires_grad_()
    module.zero_grad()
    y = module(x)
    y.backward(g.to(y.dtype))
    assert x.grad is not None
    return y.detach(), x.grad, module.weight.grad.clone()  # type: ignore[union-attr,operator]


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, 7, D_IN, generator=generator)
    g = torch.randn(3, 7, D_OUT, generator=generator) * 1e-4
    x[0, 0, 0], g[2, 1, 3] = 37.0, 0.02
    return x.to(dtype), g.to(dtype)


def relative(got: Tensor, wanted: Array) -> float:
    """Largest error over the largest value."""
    return float(np.abs(got.double().numpy() - wanted).max() / np.abs(wanted).max())


def oracle(module: QuantizedLinear, x: Tensor, g: Tensor) -> tuple[Array, Array, Array]:
    xq = dequantize(x.float().numpy().reshape(-1, D_IN), "e4m3")
    wq = dequantize(module.weight.detach().float().numpy(), "e4m3")
    gq = dequantize(g.float().numpy().reshape(-1, D_OUT), "e5m2")
    return (xq @ wq.T).reshape(3, 7, D_OUT), (gq @ wq).reshape(3, 7, D_IN), gq.T @ xq


def test_three_gemms_equal_an_fp64_oracle() -> None:
    module, (x, g) = layer(), inputs()
    for got, wanted in zip(run(module, x, g), oracle(module, x, g), strict=True):
        assert relative(got, wanted) < 1e-6


def test_quantisation_makes_a_difference() -> None:
    module, (x, g) = layer(), inputs()
    plain = nn.Linear(D_IN, D_OUT, bias=False)
    plain.weight = module.weight
    for got, exact in zip(run(module, x, g), run(plain, x, g), strict=True):
        assert 1e-3 < relative(got, exact.double().numpy()) < 0.2


def test_bf16_products_round_once_and_scales_stay_fp32() -> None:
    """The operands are exact in BF16, so only outputs are rounded: unbiased, and to a BF16 unit or two."""
    module, (x, g) = layer("bf16"), inputs(torch.bfloat16)
    for got, wanted in zip(run(module, x, g), oracle(module, x, g), strict=True):
        error = got.double().numpy() / wanted - 1
        error = error[np.abs(wanted) > 1e-3 * np.abs(wanted).max()]
        assert np.abs(error).max() < 2**-7 * 1.01  # two roundings of half a unit (2^-8) each
        assert abs(error.mean()) < 4 * 2**-8 / np.sqrt(3 * error.size)  # a rounded scale would shift them all


def test_output_dtypes() -> None:
    x, g = inputs(torch.bfloat16)
    y, dx, dw = run(layer("bf16"), x, g)
    assert (y.dtype, dx.dtype, dw.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    y, dx, dw = run(layer("bf16"), x.float(), g)
    assert (y.dtype, dx.dtype, dw.dtype) == (torch.bfloat16, torch.float32, torch.float32)


def test_which_operands_each_gemm_has() -> None:
    """forward Q(x) Q(w), dgrad Q(g) Q(w), wgrad Q(g) Q(x): with constants 3, 5, 7 the products name them."""
    module = layer()
    x_role, w_role, g_role = Tagged(3), Tagged(5), Tagged(7)
    module.activations, module.weights, module.gradients = x_role, w_role, g_role  # type: ignore[assignment]
    x, g = inputs()
    y, dx, dw = run(module, x, g)
    assert torch.equal(y, torch.full_like(y, 3.0 * 5 * D_IN))
    assert torch.equal(dx, torch.full_like(dx, 7.0 * 5 * D_OUT))
    assert torch.equal(dw, torch.full_like(dw, 7.0 * 3 * 21))
    assert [len(role.seen) for role in (x_role, w_role, g_role)] == [1, 1, 1]  # one cast serves both GEMMs
    assert torch.equal(x_role.seen[0], x.view(21, D_IN))
    assert torch.equal(w_role.seen[0], module.weight)
    assert torch.equal(g_role.seen[0], g.view(21, D_OUT))


def test_each_role_has_its_own_scale() -> None:
    module = layer()
    scales = {"activations": 2.0, "weights": 0.25, "gradients": 8.0}
    for role, scale in scales.items():
        setattr(module, role, _Scaled(scale))
    x, g = inputs()
    plain = nn.Linear(D_IN, D_OUT, bias=False)
    plain.weight = module.weight
    for got, exact in zip(run(module, x, g), run(plain, x, g), strict=True):
        assert torch.equal(got, exact)  # powers of two: scaling and scaling back leaves no trace


class _Scaled(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def cast(self, x: Tensor, along: int, compute: torch.dtype) -> Operand:
        return Operand(x.float() * self.scale, torch.tensor(1 / self.scale))


def without_quantizers(module: QuantizedLinear) -> QuantizedLinear:
    module.activations = module.weights = module.gradients = Identity()  # type: ignore[assignment]
    return module


@pytest.mark.parametrize("shape", [(3, 7), (1, 1), (64, 5), (2, 3, 4)])
def test_identity_is_nn_linear_to_the_bit_in_fp32(shape: tuple[int, ...]) -> None:
    module = without_quantizers(layer())
    plain = nn.Linear(D_IN, D_OUT, bias=False)
    plain.weight = module.weight
    x, g = torch.randn(*shape, D_IN), torch.randn(*shape, D_OUT)
    for got, wanted in zip(run(module, x, g), run(plain, x, g), strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_identity_is_nn_linear_to_the_bit_in_bf16(weights: torch.dtype, dtype: torch.dtype) -> None:
    """Against autocast over FP32 weights, and against BF16 weights."""
    module = without_quantizers(layer("bf16"))
    module.weight.data = module.weight.data.to(weights)
    plain = nn.Linear(D_IN, D_OUT, bias=False)
    plain.weight = nn.Parameter(module.weight.detach().clone())
    x, g = inputs(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        for got, wanted in zip(run(module, x, g), run(plain, x, g), strict=True):
            assert got.dtype == wanted.dtype
            assert torch.equal(got, wanted)


def test_bias_is_added_in_high_precision() -> None:
    module = layer(bias=True)
    x, g = inputs()
    bare = layer()
    assert torch.equal(run(module, x, g)[0], run(bare, x, g)[0] + module.bias)
    assert module.bias.grad is not None
    assert torch.allclose(module.bias.grad, g.sum((0, 1)), rtol=1e-5)


def test_the_replaced_weight_of_one_call_is_the_one_cast() -> None:
    module = layer()
    x, _ = inputs()
    other = layer()
    with torch.no_grad():
        other.weight.mul_(4)
    assert torch.equal(module(x, module.weight * 4), other(x))
    assert torch.equal(module.high_precision(x, module.weight * 4), x @ (module.weight * 4).t())


def test_no_gradient_for_what_needs_none() -> None:
    module = layer()
    module.weight.requires_grad_(False)
    x = inputs()[0].requires_grad_()
    module(x).sum().backward()
    assert x.grad is not None and module.weight.grad is None


def test_delayed_gradients_are_clipped_at_the_old_scale() -> None:
    """The gradients' quantiser too works from its history."""
    module = layer(scaling="delayed", history=1)
    x, g = inputs()
    for _ in range(2):
        run(module, x, g)
        for quantizer in module.modules():
            if isinstance(quantizer, Quantizer):
                quantizer.end_step()
    assert float(module.gradients.amax_history[0]) == pytest.approx(float(g.abs().max()))
    dw = run(module, x, g * 1000)[2]
    clipped = g.numpy().reshape(-1, D_OUT).astype(np.float64) * 1000
    gq = dequantize(clipped, "e5m2", amax=float(g.abs().max()))
    assert relative(dw, gq.T @ dequantize(x.numpy().reshape(-1, D_IN), "e4m3")) < 1e-6
