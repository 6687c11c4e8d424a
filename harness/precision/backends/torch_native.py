"""A linear whose three GEMMs are PyTorch's scaled products (`torch._scaled_mm`, `torch.nn.functional.scaled_mm`).

    forward   y  = Q(x) Q(w)^T      contraction over d_in
    dgrad     dx = Q(g) Q(w)        contraction over d_out
    wgrad     dw = Q(g)^T Q(x)      contraction over tokens

Quantisers, and so scales, histories, statistics and the noise of stochastic rounding, are the emulation's; the
quantised operands equal its own bit for bit, and only the products differ: by their accumulation, and by scales applied
before the one rounding to BF16. Tensor cores may keep narrow partial sums in the forward pass alone, as frameworks do.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from harness.precision.backends.operands import Operand, to_operand
from harness.precision.backends.products import MULTIPLES, multiply
from harness.precision.backends.requirements import gemm_scheme
from harness.precision.hadamard import transform
from harness.precision.linear import Linear, QuantizedLinear, apply_recipe
from harness.precision.scaling import Quantizer
from harness.spec import PrecisionSpec, RecipeSpec
from harness.spec.roles import ALONG, FIRST, GEMMS, ROLES, SECOND, GemmName, Role

Side = Operand | Tensor
"""One side of a GEMM with the contraction last: quantised, or in the compute dtype."""


class _ScaledProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: ScaledLinear) -> Tensor:
        sides: dict[Role, Side] = {
            "activations": layer.side("forward", "activations", x),
            "weights": layer.side("forward", "weights", weight),
        }
        ctx.layer, ctx.dtypes = layer, (x.dtype, weight.dtype)
        # Of a role whose cast serves the backward pass too the codes are kept, of any other the tensor.
        ctx.kept = {}
        tensors: list[Tensor] = []
        given_to: dict[Role, Tensor] = {"activations": x, "weights": weight}
        for role, given in given_to.items():
            side = sides[role]
            if isinstance(side, Operand) and layer.shared[role]:
                saved = [side.codes, side.scale, *([] if side.outer is None else [side.outer])]
                ctx.kept[role] = (side.scheme, side.block, len(tensors), len(saved))
            else:
                saved = [given]
                ctx.kept[role] = (None, None, len(tensors), 1)
            tensors += saved
        ctx.save_for_backward(*tensors)
        return layer.multiply("forward", sides["activations"], sides["weights"])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        layer: ScaledLinear = ctx.layer
        g = grads[0]
        dx = dw = None
        first: Side | None = None
        if ctx.needs_input_grad[0] or layer.shared["gradients"]:
            first = layer.side("dgrad", "gradients", g)
        if ctx.needs_input_grad[0] and first is not None:
            dx = layer.multiply("dgrad", first, _kept(ctx, "weights")).to(ctx.dtypes[0])
        if ctx.needs_input_grad[1]:
            if isinstance(first, Operand) and layer.shared["gradients"]:
                left: Side = first.transposed()
            else:
                left = layer.side("wgrad", "gradients", g)
            dw = layer.multiply("wgrad", left, _kept(ctx, "activations")).to(ctx.dtypes[1])
        return dx, dw, None


def _kept(ctx: Any, role: Role) -> Side:
    """What the second GEMM of `role` reads: the first one's codes, or another cast of the tensor."""
    scheme, block, start, count = ctx.kept[role]
    saved = ctx.saved_tensors[start : start + count]
    if scheme is None:
        side: Side = ctx.layer.side(SECOND[role], role, saved[0])
        return side
    return Operand(saved[0], saved[1], scheme, block, saved[2] if count > 2 else None).transposed()


class ScaledLinear(QuantizedLinear):
    """`QuantizedLinear` on native products. `x` [..., d_in] -> BF16 [..., d_out]."""

    def forward(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            flat = x.reshape(-1, self.in_features)
            y: Tensor = _ScaledProduct.apply(flat, self.weight if weight is None else weight, self)
            y = y.view(*x.shape[:-1], self.out_features)
            return y if self.bias is None else y + self.bias.to(y.dtype)

    def side(self, gemm: GemmName, role: Role, x: Tensor) -> Side:
        """`x` [rows, cols] as `gemm` reads it, turned so that its contraction comes last."""
        along = ALONG[gemm][ROLES[gemm].index(role)]
        home = self if gemm == FIRST[role] or self.shared[role] else getattr(self, gemm)
        quantizer = cast("Quantizer | None", getattr(home, role))
        if quantizer is None:
            plain = x.to(self.compute)
            return plain if along == 1 else plain.t()
        blocks = quantizer.spec.block_shape is not None
        result = quantizer.cast(x, along, torch.float32 if blocks else torch.bfloat16)
        if blocks and quantizer.spec.hadamard:
            x = transform(x, quantizer.spec.hadamard, along=along)
        return to_operand(result, x, quantizer.spec)

    def multiply(self, gemm: GemmName, left: Side, right: Side) -> Tensor:
        """The GEMM's output, BF16."""
        if isinstance(left, Operand) and isinstance(right, Operand):
            return multiply(left, right, fast=gemm == "forward")
        assert isinstance(left, Tensor) and isinstance(right, Tensor)
        return left @ right.t()


def apply_torch(model: nn.Module, precision: PrecisionSpec, *, seed: int = 0) -> tuple[list[str], list[str]]:
    """Replace every linear the recipe covers by a `ScaledLinear`, in place.

    Returns (their names, the names of those that stay unquantised because their sizes do not divide as products need).
    """
    covered = apply_recipe(model, precision, seed=seed)
    multiple = _multiple(precision.recipe)
    replaced, unfit = [], []
    for name in covered:
        old = model.get_submodule(name)
        assert isinstance(old, QuantizedLinear)
        if old.in_features % multiple or old.out_features % multiple:
            model.set_submodule(name, plain(old))
            unfit.append(name)
        else:
            model.set_submodule(name, ScaledLinear(old, precision, name, seed))
            replaced.append(name)
    return replaced, unfit


def plain(old: QuantizedLinear) -> Linear:
    """The linear without quantisers, on the same parameters."""
    new = Linear(old.in_features, old.out_features, bias=old.bias is not None, device="meta")
    new.weight, new.bias = old.weight, old.bias
    return new


def _multiple(recipe: RecipeSpec | None) -> int:
    """What d_in and d_out of a layer must divide by for all three GEMMs."""
    if recipe is None:
        return 1
    schemes = [gemm_scheme(*recipe.operands(gemm)) for gemm in GEMMS]
    return max((MULTIPLES[scheme] for scheme in schemes if scheme is not None), default=1)
