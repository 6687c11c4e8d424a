"""A linear layer whose three GEMMs see quantised operands, and the walk that puts it into a model.

    forward   y  = Q(x) Q(w)^T      contraction over d_in
    dgrad     dx = Q(g) Q(w)        contraction over d_out
    wgrad     dw = Q(g)^T Q(x)      contraction over tokens

`harness.precision.operands` says which casts are shared and what dtype a product runs in. Rounding is straight-through:
the derivative of the cast is 1. Products accumulate in FP32 unless the recipe imitates another accumulator; scales
that stand outside the sum multiply the output, which is then in the compute dtype, as a kernel's is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from harness.precision import accumulate
from harness.precision.operands import CARRIERS, Operand, carrier, rescale
from harness.precision.scaling import Quantizer, end_steps
from harness.spec import PrecisionSpec, RecipeSpec
from harness.spec.roles import ALONG, FIRST, GEMMS, ROLES, SECOND, GemmName, Role, is_shared, spec_of

_BLOCK = re.compile(r"layers\.(\d+)\.")


class _QuantizedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: QuantizedLinear) -> Tensor:
        xo = layer.operand("forward", "activations", x)
        wo = layer.operand("forward", "weights", weight)
        kept_x = xo if layer.shared["activations"] else Operand(x)
        kept_w = wo if layer.shared["weights"] else Operand(weight)
        ctx.save_for_backward(*kept_x, *kept_w)
        ctx.layer, ctx.dtypes = layer, (x.dtype, weight.dtype)
        return layer.product("forward", xo, wo)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        layer: QuantizedLinear = ctx.layer
        x, x_inverse, weight, w_inverse = ctx.saved_tensors
        g, go = grads[0], None
        dx = dw = None
        if ctx.needs_input_grad[0] or layer.shared["gradients"]:
            go = layer.operand("dgrad", "gradients", g)
        if ctx.needs_input_grad[0] and go is not None:
            wo = layer.second("weights", Operand(weight, w_inverse))
            dx = layer.product("dgrad", go, wo).to(ctx.dtypes[0])
        if ctx.needs_input_grad[1]:
            go = layer.second("gradients", go if go is not None and layer.shared["gradients"] else Operand(g))
            xo = layer.second("activations", Operand(x, x_inverse))
            dw = layer.product("wgrad", go, xo, ctx.dtypes[1])
        return dx, dw, None


class Linear(nn.Linear):
    """nn.Linear whose weight may be replaced for one call (ageing and Smooth-SwiGLU scale its rows or columns)."""

    def forward(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        return F.linear(x, self.weight if weight is None else weight, self.bias)


class QuantizedLinear(Linear):
    """`Linear` with a quantiser for each cast of its GEMMs' operands. `x` [..., d_in] -> [..., d_out] in the compute
    dtype.

    The cast that a role's first GEMM reads is called by the role (`activations`); a further one by its GEMM too
    (`wgrad.activations`). A role that a GEMM leaves unquantised has no quantiser there.
    """

    def __init__(self, linear: Linear, precision: PrecisionSpec, name: str = "", seed: int = 0) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        recipe = precision.recipe or RecipeSpec()
        self.carriers = {gemm: carrier(precision, gemm)[0] for gemm in GEMMS}
        self.compute = CARRIERS[precision.compute]
        self.accumulation = recipe.accumulation
        self.shared = {role: is_shared(recipe, role) for role in FIRST}
        self.dgrad, self.wgrad = nn.Module(), nn.Module()
        for role in FIRST:
            self._add(self, recipe, FIRST[role], role, f"{name}.{role}", seed)
            if not self.shared[role]:
                gemm = SECOND[role]
                self._add(getattr(self, gemm), recipe, gemm, role, f"{name}.{gemm}.{role}", seed)
        self.to(linear.weight.device)  # the quantisers' histories

    @staticmethod
    def _add(home: nn.Module, recipe: RecipeSpec, gemm: GemmName, role: Role, name: str, seed: int) -> None:
        spec = spec_of(recipe, gemm, role)
        quantizer = None if spec is None else Quantizer(spec, name, seed)
        if quantizer is not None:
            quantizer.in_forward = gemm == "forward"
        home.add_module(role, quantizer)

    def forward(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            flat = x.reshape(-1, self.in_features)
            y: Tensor = _QuantizedProduct.apply(flat, self.weight if weight is None else weight, self)
            y = y.view(*x.shape[:-1], self.out_features)
            return y if self.bias is None else y + self.bias.to(y.dtype)

    def high_precision(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        """The same product without quantisers, for comparing."""
        return F.linear(x, self.weight if weight is None else weight, self.bias)

    def operand(self, gemm: GemmName, role: Role, x: Tensor, home: nn.Module | None = None) -> Operand:
        """`x` [rows, cols] as `gemm` reads it: cast along its contraction, or in the compute dtype."""
        quantizer = cast("Quantizer | None", getattr(home or self, role))
        if quantizer is None:
            return Operand(x.to(self.compute))
        result = quantizer.cast(x, ALONG[gemm][ROLES[gemm].index(role)], self.compute)
        return Operand(result.values, result.inverse)

    def second(self, role: Role, kept: Operand) -> Operand:
        """What the second GEMM of `role` reads, from what the first left: its operand, or the tensor itself."""
        if self.shared[role]:
            return kept
        gemm = SECOND[role]
        return self.operand(gemm, role, kept.values, getattr(self, gemm))

    def product(
        self, gemm: GemmName, left: Operand, right: Operand, dtype: torch.dtype | None = None
    ) -> Tensor:
        """The GEMM's output, rounded to the compute dtype and returned in `dtype`."""
        dtype = dtype or self.compute
        carrier = self.carriers[gemm]
        a, b = left.values.to(carrier), right.values.to(carrier)
        a, b = (a.t() if ALONG[gemm][0] == 0 else a), (b.t() if ALONG[gemm][1] == 1 else b)
        y = a @ b if self.accumulation is None else accumulate.matmul(a, b, self.accumulation)
        if carrier == self.compute:
            return rescale(y.to(dtype), left.inverse, right.inverse)
        return rescale(y, left.inverse, right.inverse).to(self.compute).to(dtype)


def apply_recipe(model: nn.Module, precision: PrecisionSpec, *, seed: int = 0) -> list[str]:
    """Replace every linear the recipe covers by a `QuantizedLinear`, in place; return their names.

    `seed` is the run's: stochastic rounding draws from it.
    """
    if precision.recipe is None:
        return []
    replaced = []
    linears = [(name, module) for name, module in model.named_modules() if isinstance(module, Linear)]
    left_out = (
        *precision.recipe.high_precision,
        *_end_blocks([name for name, _ in linears], precision.recipe),
    )
    for name, module in linears:
        if _is_exception(name, left_out):
            continue
        parent_name, _, child = name.rpartition(".")
        quantized = QuantizedLinear(module, precision, name, seed)
        setattr(model.get_submodule(parent_name), child, quantized)
        replaced.append(name)
    return replaced


def _end_blocks(names: list[str], recipe: RecipeSpec) -> list[str]:
    """Patterns of the blocks that stay unquantised at the model's start and end."""
    blocks = sorted({int(match[1]) for name in names if (match := _BLOCK.match(name))})
    first, last = recipe.high_precision_first, recipe.high_precision_last
    return [f"layers.{block}" for block in (*blocks[:first], *(blocks[-last:] if last else ()))]


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


def begin_step(model: nn.Module, step: int) -> None:
    """Tell every quantiser which training step comes, before its forward pass."""
    for _, quantizer in quantizers(model):
        quantizer.begin_step(step)


def end_step(model: nn.Module) -> None:
    """Tell every quantiser that an optimizer step is over."""
    end_steps([quantizer for _, quantizer in quantizers(model)])
