"""A linear layer whose three GEMMs see quantised operands, and the walk that puts it into a model.

    forward   y  = Q(x) Q(w)^T      contraction over d_in
    dgrad     dx = Q(g) Q(w)        contraction over d_out
    wgrad     dw = Q(g)^T Q(x)      contraction over tokens

Per-tensor scales are the same along either dimension, so the transposed operands of dgrad and wgrad are the very
casts of the forward pass, as in Transformer Engine's per-tensor recipes (HYBRID: E4M3 forward, E5M2 gradients).
Rounding is straight-through: the derivative of the cast is 1. Products run in the compute dtype (FP8 grids are exact
in BF16) with FP32 accumulation; the output is then multiplied by the two inverse scales.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from harness.precision.scaling import Quantizer
from harness.spec import PrecisionSpec, RecipeSpec

CARRIERS = {"fp32": torch.float32, "bf16": torch.bfloat16}


class _QuantizedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: QuantizedLinear) -> Tensor:
        carrier = layer.carrier
        xq, x_inverse = layer.activations(x)
        wq, w_inverse = layer.weights(weight)
        xq, wq = xq.to(carrier), wq.to(carrier)
        ctx.save_for_backward(xq, wq, x_inverse, w_inverse)
        ctx.layer, ctx.dtypes = layer, (x.dtype, weight.dtype)
        return _rescale(xq @ wq.t(), x_inverse * w_inverse)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        xq, wq, x_inverse, w_inverse = ctx.saved_tensors
        gq, g_inverse = ctx.layer.gradients(grads[0])
        gq = gq.to(wq.dtype)
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = _rescale(gq @ wq, g_inverse * w_inverse).to(ctx.dtypes[0])
        if ctx.needs_input_grad[1]:
            dw = _rescale((gq.t() @ xq).to(ctx.dtypes[1]), g_inverse * x_inverse)
        return dx, dw, None


def _rescale(product: Tensor, inverse: Tensor) -> Tensor:
    """`product` times the FP32 scalar `inverse`, in place. The scalar must not be rounded to BF16: that would be the
    same error, up to 2^-8, in every element. On a CPU a 0-dim factor is read as it is and the 1-element form is 30
    times as slow; on a GPU a 0-dim factor is cast to the product's dtype first, one with a dimension is not.
    """
    if product.device.type == "cpu":
        return product.mul_(inverse)
    return torch.mul(product, inverse.view(1), out=product)


class Linear(nn.Linear):
    """nn.Linear whose weight may be replaced for one call (ageing and Smooth-SwiGLU scale its rows or columns)."""

    def forward(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        return F.linear(x, self.weight if weight is None else weight, self.bias)


class QuantizedLinear(Linear):
    """`Linear` with a quantiser for each role. `x` [..., d_in] -> [..., d_out] in the compute dtype."""

    def __init__(self, linear: Linear, recipe: RecipeSpec, carrier: torch.dtype) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.carrier = carrier
        self.activations = Quantizer(recipe.activations)
        self.weights = Quantizer(recipe.weights)
        self.gradients = Quantizer(recipe.gradients)
        self.to(linear.weight.device)  # the quantisers' histories

    def forward(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            flat = x.reshape(-1, self.in_features)
            y: Tensor = _QuantizedProduct.apply(flat, self.weight if weight is None else weight, self)
            y = y.view(*x.shape[:-1], self.out_features)
            return y if self.bias is None else y + self.bias.to(y.dtype)

    def high_precision(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        """The same product without quantisers, for comparing."""
        return F.linear(x, self.weight if weight is None else weight, self.bias)


def apply_recipe(model: nn.Module, precision: PrecisionSpec) -> list[str]:
    """Replace every linear the recipe covers by a `QuantizedLinear`, in place; return their names."""
    if precision.recipe is None:
        return []
    if precision.compute not in CARRIERS:
        raise ValueError(f"FP8 emulation computes in fp32 or bf16, not {precision.compute}")
    replaced = []
    for name, module in list(model.named_modules()):
        if not isinstance(module, Linear) or _is_exception(name, precision.recipe.high_precision):
            continue
        parent_name, _, child = name.rpartition(".")
        quantized = QuantizedLinear(module, precision.recipe, CARRIERS[precision.compute])
        setattr(model.get_submodule(parent_name), child, quantized)
        replaced.append(name)
    return replaced


def _is_exception(name: str, patterns: tuple[str, ...]) -> bool:
    """A pattern names a whole path, or its first or last parts: `head`, `ffn.down`, `layers.0`."""
    return any(
        name == pattern or name.endswith("." + pattern) or name.startswith(pattern + ".")
        for pattern in patterns
    )


def quantizers(model: nn.Module) -> Iterator[tuple[str, Quantizer]]:
    """(name such as layers.0.ffn.down.activations, quantiser) of every quantiser of the model."""
    for name, module in model.named_modules():
        if isinstance(module, Quantizer):
            yield name, module


def end_step(model: nn.Module) -> None:
    """Tell every quantiser that an optimizer step is over."""
    for _, quantizer in quantizers(model):
        quantizer.end_step()
