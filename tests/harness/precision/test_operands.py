"""Which tensor each GEMM multiplies: direction of the blocks, shared casts, unquantised roles, carriers, scales."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from harness.precision import accumulate
from harness.precision.hadamard import transform
from harness.precision.linear import Linear, QuantizedLinear, quantizers
from harness.precision.operands import carrier_note, rescale
from harness.spec import AccumulationSpec, GemmOverride, PrecisionSpec, QuantizerSpec, RecipeSpec

from .conftest import MAXIMA, Array, cast

TOKENS, D_IN, D_OUT = 21, 40, 24


def spec(fmt: str = "e4m3", scaling: str = "block", **more: Any) -> QuantizerSpec:
    return QuantizerSpec(format=fmt, scaling=scaling, power_of_two=scaling != "mx", **more)  # type: ignore[arg-type]


def layer(recipe: RecipeSpec, compute: str = "fp32") -> QuantizedLinear:
    torch.manual_seed(0)
    precision = PrecisionSpec(name="test", compute=compute, recipe=recipe)  # type: ignore[arg-type]
    return QuantizedLinear(Linear(D_IN, D_OUT, bias=False), precision, "layers.0.ffn.down")


def inputs() -> tuple[Tensor, Tensor]:
    """Tensors whose magnitude varies along both dimensions, so that each direction of blocks gives other values."""
    generator = torch.Generator().manual_seed(1)
    x, g = (torch.randn(TOKENS, width, generator=generator) for width in (D_IN, D_OUT))
    steps = torch.arange(TOKENS)[:, None]
    return x * torch.exp2(-3.0 * (steps % 5) - torch.arange(D_IN) % 7), g * torch.exp2(-2.0 * (steps % 4))


def run(module: QuantizedLinear, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x = x.clone().requires_grad_()
    module.zero_grad()
    y = module(x)
    y.backward(g.to(y.dtype))
    assert x.grad is not None and module.weight.grad is not None
    return y.detach(), x.grad, module.weight.grad.clone()


def dequantized(x: Tensor, fmt: str, along: int, block: tuple[int, int]) -> Array:
    """NumPy: one power-of-two scale per block of (across, along), the last ones short."""
    source = x.detach().numpy() if along == 1 else x.detach().numpy().T
    out = np.zeros(source.shape, np.float64)
    for i in range(0, source.shape[0], block[0]):
        for j in range(0, source.shape[1], block[1]):
            part = source[i : i + block[0], j : j + block[1]]
            scale = 2.0 ** np.floor(np.log2(MAXIMA[fmt] / np.abs(part).max()))
            out[i : i + block[0], j : j + block[1]] = cast(part * np.float32(scale), fmt) / scale
    return out if along == 1 else out.T


def agree(got: Tensor, wanted: Array) -> bool:
    return bool(np.abs(got.double().numpy() - wanted).max() <= 1e-6 * np.abs(wanted).max())


ROW = {"scaling": "row"}


@pytest.mark.parametrize("size", [8, 16, 128])
def test_blocks_lie_along_each_gemm_s_contraction(size: int) -> None:
    """16 and 128 divide none of the widths. Under FP4 every block's scale shows in the values."""
    block = (1, size)
    fp4, fp8 = spec("e2m1", block=block), spec("e5m2", block=block)
    module = layer(RecipeSpec(activations=fp4, weights=fp4, gradients=fp8))
    (x, g), w = inputs(), module.weight
    y, dx, dw = run(module, x, g)
    assert agree(y, dequantized(x, "e2m1", 1, block) @ dequantized(w, "e2m1", 1, block).T)
    assert agree(dx, dequantized(g, "e5m2", 1, block) @ dequantized(w, "e2m1", 0, block))
    assert agree(dw, dequantized(g, "e5m2", 0, block).T @ dequantized(x, "e2m1", 0, block))
    if size == 8:  # along the other dimension the values are others
        assert not agree(dx, dequantized(g, "e5m2", 1, block) @ dequantized(w, "e2m1", 1, block))
        assert not agree(dw, dequantized(g, "e5m2", 0, block).T @ dequantized(x, "e2m1", 1, block))


def test_rows_are_what_each_contraction_crosses() -> None:
    """A scale per row is a block as long as the contraction, and multiplies the output from outside."""
    module = layer(
        RecipeSpec(
            activations=spec("e2m1", **ROW), weights=spec("e2m1", **ROW), gradients=spec("e2m1", **ROW)
        )
    )
    (x, g), w, row = inputs(), module.weight, (1, 4096)
    y, dx, dw = run(module, x, g)
    assert agree(y, dequantized(x, "e2m1", 1, row) @ dequantized(w, "e2m1", 1, row).T)
    assert agree(dx, dequantized(g, "e2m1", 1, row) @ dequantized(w, "e2m1", 0, row))
    assert agree(dw, dequantized(g, "e2m1", 0, row).T @ dequantized(x, "e2m1", 0, row))


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_every_scaling_gives_the_product_of_its_casts(compute: str) -> None:
    """Against `cast` itself, for the scalings that have an oracle elsewhere: direction, inverses and carrier."""
    from harness.precision.cast import cast as cast_once
    from harness.precision.cast import dequantize

    specs = [
        QuantizerSpec(format="e4m3", scaling="none"),
        QuantizerSpec(format="e4m3", scaling="static", scale=8.0),
        QuantizerSpec(format="int8", scaling="row"),
        QuantizerSpec(format="e4m3", scaling="mx", scale_rounding="up"),
        QuantizerSpec(format="e2m1", scaling="nvfp4"),
        QuantizerSpec(format="int4-asym", scaling="block", block=(1, 16)),
        QuantizerSpec(format="int4", scaling="block", block=(1, 16), keep_top=2),
        QuantizerSpec(format="nf4", scaling="block", block=(1, 64)),
        QuantizerSpec(format="e4m3", scaling="block", block=(1, 16)),
    ]
    x, g = (tensor.bfloat16().float() for tensor in inputs())
    for one in specs:
        module = layer(RecipeSpec(activations=one, weights=one, gradients=one), compute)

        def hat(tensor: Tensor, along: int, one: QuantizerSpec = one) -> Tensor:
            return dequantize(cast_once(tensor.detach(), one, along=along)).double()

        w = module.weight
        wanted = (hat(x, 1) @ hat(w, 1).t(), hat(g, 1) @ hat(w, 0), hat(g, 0).t() @ hat(x, 0))
        for got, exact in zip(run(module, x, g), wanted, strict=True):
            bound = 1e-5 if compute == "fp32" else 2**-7
            error = (got.double() - exact).abs().max() / exact.abs().max()
            assert float(error) < bound, (one, float(error))


def names(recipe: RecipeSpec) -> set[str]:
    return {name for name, _ in quantizers(layer(recipe))}


ROLES = {"activations", "weights", "gradients"}


@pytest.mark.parametrize(
    ("one", "own"),
    [
        ({"scaling": "current"}, set()),
        ({"scaling": "delayed"}, set()),
        ({"scaling": "none"}, set()),
        ({"scaling": "static", "scale": 2.0}, set()),
        ({"scaling": "block", "block": (16, 16)}, set()),
        ({"scaling": "mx", "block": (32, 32)}, set()),
        ({"scaling": "row"}, {"dgrad.weights", "wgrad.activations", "wgrad.gradients"}),
        ({"scaling": "block", "block": (1, 16)}, {"dgrad.weights", "wgrad.activations", "wgrad.gradients"}),
        ({"scaling": "mx"}, {"dgrad.weights", "wgrad.activations", "wgrad.gradients"}),
    ],
)
def test_which_casts_are_made_once(one: dict[str, Any], own: set[str]) -> None:
    same = QuantizerSpec(format="e4m3", **one)
    assert names(RecipeSpec(activations=same, weights=same, gradients=same)) == ROLES | own


def test_a_quantiser_s_name_is_its_path() -> None:
    module = layer(RecipeSpec(activations=spec(), weights=spec(), gradients=spec()))
    for name, quantizer in quantizers(module):
        assert quantizer.identity[0] == f"layers.0.ffn.down.{name}"


def test_square_blocks_are_the_same_weights_forward_and_backward() -> None:
    square = (16, 16)
    module = layer(RecipeSpec(weights=spec("e2m1", block=square)))
    (x, g), w = inputs(), module.weight
    y, dx, dw = run(module, x, g)
    hat = dequantized(w, "e2m1", 1, square)
    assert agree(y, x.double().numpy() @ hat.T) and agree(dx, g.double().numpy() @ hat)
    assert agree(dw, g.double().numpy().T @ x.double().numpy())


def test_unquantised_gradients_meet_the_forward_pass_s_casts() -> None:
    """Stable-SPAM's set-up: dx from Q(w) and dw from Q(x), both along d_in."""
    block = (1, 8)
    recipe = RecipeSpec(activations=spec("e2m1", block=block), weights=spec("e2m1", block=block))
    assert names(recipe) == {"activations", "weights"}
    module = layer(recipe)
    (x, g), w = inputs(), module.weight
    _, dx, dw = run(module, x, g)
    assert agree(dx, g.double().numpy() @ dequantized(w, "e2m1", 1, block))
    assert agree(dw, g.double().numpy().T @ dequantized(x, "e2m1", 1, block))


def test_an_unquantised_gemm_sees_the_tensors_themselves() -> None:
    same = spec(**ROW)
    recipe = RecipeSpec(activations=same, weights=same, gradients=same, wgrad=GemmOverride(quantized=False))
    assert names(recipe) == ROLES | {"dgrad.weights"}
    x, g = inputs()
    dw = run(layer(recipe), x, g)[2]
    assert torch.equal(dw, g.t() @ x)


def test_an_override_of_one_gemm() -> None:
    """torchao's rowwise_with_gw_hp: the backward pass takes a per-tensor scale for the weights."""
    same, tensor = spec(**ROW), spec(scaling="current")
    recipe = RecipeSpec(activations=same, weights=same, gradients=same, dgrad=GemmOverride(weights=tensor))
    module = layer(recipe)
    (x, g), row = inputs(), (1, 4096)
    dx = run(module, x, g)[1]
    assert agree(dx, dequantized(g, "e4m3", 1, row) @ dequantized(module.weight, "e4m3", 1, (4096, 4096)))


def test_the_hadamard_transform_leaves_an_unquantised_product_unchanged() -> None:
    """FP32 casts with and without it: 16 of the 21 tokens are transformed, on both operands."""
    plain = QuantizerSpec(format="fp32", scaling="none")
    turned = plain.model_copy(update={"hadamard": 16})
    override = GemmOverride(activations=turned, gradients=turned)
    recipe = RecipeSpec(activations=plain, weights=plain, gradients=plain, wgrad=override)
    (x, g), module = inputs(), layer(recipe)
    seen = []
    for role in ("activations", "gradients"):
        quantizer = getattr(module.wgrad, role)
        original = quantizer.cast
        quantizer.cast = lambda *args, original=original: seen.append(original(*args)) or seen[-1]
    y, dx, dw = run(module, x, g)
    assert torch.equal(y, x @ module.weight.t()) and torch.equal(dx, g @ module.weight)
    assert torch.allclose(dw, g.t() @ x, atol=1e-5 * float((g.t() @ x).abs().max()))
    assert torch.equal(seen[0].values, transform(g, 16, along=0))
    assert torch.equal(seen[1].values, transform(x, 16, along=0))


BF16, FP32 = "bfloat16", "float32"


@pytest.mark.parametrize(
    ("recipe", "compute", "note"),
    [
        ({"activations": spec()}, "bf16", (BF16, "all its operands are BF16 numbers")),
        ({"activations": spec()}, "fp32", (FP32, "the run computes in fp32")),
        (
            {"weights": QuantizerSpec(format="int4", scaling="block", block=(1, 16))},
            "bf16",
            (
                "forward float32, dgrad float32, wgrad bfloat16",
                "forward, dgrad: values of int4:block16 are not BF16 numbers; "
                "wgrad: all its operands are BF16 numbers",
            ),
        ),
        (
            {"activations": spec(), "accumulation": AccumulationSpec()},
            "bf16",
            (FP32, "the imitated accumulator is cut from an FP32 one"),
        ),
    ],
)
def test_what_products_run_in(recipe: dict[str, Any], compute: str, note: tuple[str, str]) -> None:
    precision = PrecisionSpec(name="test", compute=compute, recipe=RecipeSpec(**recipe))  # type: ignore[arg-type]
    assert carrier_note(precision) == note


def test_a_wide_carrier_still_gives_the_compute_dtype() -> None:
    """Operands that BF16 cannot hold are multiplied in FP32 and the output is rounded once."""
    int4 = QuantizerSpec(format="int4", scaling="block", block=(1, 16))
    recipe = RecipeSpec(activations=int4, weights=int4)
    (x, g), exact = inputs(), layer(recipe)
    x, g = x.bfloat16().float(), g.bfloat16().float()
    for got, wanted in zip(run(layer(recipe, "bf16"), x.bfloat16(), g), run(exact, x, g), strict=True):
        assert torch.equal(got, wanted.bfloat16().to(got.dtype))


@pytest.mark.parametrize("promote_every", [0, 16])
def test_the_accumulator_is_in_all_three_products(promote_every: int) -> None:
    accumulation = AccumulationSpec(mantissa_bits=5, instruction_k=4, promote_every=promote_every)
    recipe = RecipeSpec(accumulation=accumulation)
    (x, g), module = inputs(), layer(recipe)
    y, dx, dw = run(module, x, g)
    w = module.weight.detach()
    for got, (a, b) in zip((y, dx, dw), ((x, w.t()), (g, w), (g.t(), x)), strict=True):
        assert torch.equal(got, accumulate.matmul(a, b, accumulation))
        assert not torch.allclose(got, a @ b, rtol=1e-3)


def test_no_gradient_of_the_input_still_casts_the_shared_gradient() -> None:
    same = QuantizerSpec(format="e5m2", scaling="current")
    recipe = RecipeSpec(activations=same, weights=same, gradients=same)
    x, g = inputs()
    first, second = layer(recipe), layer(recipe)
    wanted = run(first, x, g)[2]
    second(x).backward(g)
    assert second.weight.grad is not None and torch.equal(second.weight.grad, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_factors_stay_fp32(dtype: torch.dtype) -> None:
    """Rows times columns in any mixture of scalars, vectors and nothing."""
    product = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    scalar, rows, columns = torch.tensor(1.003), torch.rand(6) + 0.5, torch.rand(5) + 0.5
    for left in (None, scalar, rows):
        for right in (None, scalar, columns):
            wanted = product.double()
            wanted = wanted if left is None else wanted * (left if left.dim() == 0 else left[:, None])
            wanted = wanted if right is None else wanted * right
            got = rescale(product.clone(), left, right)
            assert got.dtype == dtype
            bound = 2**-8 if dtype == torch.bfloat16 else 2**-22
            assert float(((got.double() - wanted) / wanted).abs().max()) <= bound * 1.01
