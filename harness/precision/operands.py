"""What each GEMM of a linear reads: which casts are shared, in which dtype the product runs, and how scales come out.

    GEMM      left operand          right operand         contraction
    forward   activations [t, i]    weights [o, i]        i (d_in)
    dgrad     gradients [t, o]      weights [o, i]        o (d_out)
    wgrad     gradients [t, o]      activations [t, i]    t (tokens)

harness.spec.roles says which cast serves two of them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from harness.spec import PrecisionSpec, RecipeSpec
from harness.spec.notation import cast_name
from harness.spec.roles import GEMMS, GemmName

CARRIERS = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Operand(NamedTuple):
    """One side of a product. `inverse` (FP32, [] or one per row of the product's side) stands outside the sum."""

    values: Tensor
    inverse: Tensor | None = None


def carrier(precision: PrecisionSpec, gemm: GemmName) -> tuple[torch.dtype, str]:
    """The dtype that the operands of `gemm` are multiplied in, and why. Raises ValueError for fp16."""
    if precision.compute not in CARRIERS:
        raise ValueError(f"emulated casts compute in fp32 or bf16, not {precision.compute}")
    recipe = precision.recipe or RecipeSpec()
    if precision.compute == "fp32":
        return torch.float32, "the run computes in fp32"
    if recipe.accumulation is not None:
        return torch.float32, "the imitated accumulator is cut from an FP32 one"
    wide = [spec for spec in recipe.operands(gemm) if spec is not None and not spec.exact_in_bf16]
    if wide:
        names = " and ".join(dict.fromkeys(cast_name(spec) for spec in wide))
        return torch.float32, f"values of {names} are not BF16 numbers"
    return torch.bfloat16, "all its operands are BF16 numbers"


def carrier_note(precision: PrecisionSpec) -> tuple[str, str]:
    """(dtypes that the products run in, why), for the journal: one where all GEMMs agree, else each GEMM's."""
    found = {gemm: carrier(precision, gemm) for gemm in GEMMS}
    names = {gemm: str(dtype).removeprefix("torch.") for gemm, (dtype, _) in found.items()}
    reasons: dict[str, list[str]] = {}
    for gemm, (_, why) in found.items():
        reasons.setdefault(why, []).append(gemm)
    if len(reasons) == 1:
        return names["forward"], next(iter(reasons))
    same = len(set(names.values())) == 1
    value = names["forward"] if same else ", ".join(f"{gemm} {name}" for gemm, name in names.items())
    return value, "; ".join(f"{', '.join(gemms)}: {why}" for why, gemms in reasons.items())


def rescale(product: Tensor, left: Tensor | None, right: Tensor | None) -> Tensor:
    """`product` [m, n] times the inverse scales of its left ([] or [m]) and right ([] or [n]) operand, in place.

    The factors must not be rounded to BF16: a rounded scale is the same error, up to 2^-8, in every element.
    """
    if left is None and right is None:
        return product
    if all(factor is None or factor.dim() == 0 for factor in (left, right)):
        factor = right if left is None else left if right is None else left * right
        assert factor is not None
        return _times_scalar(product, factor)
    wide = product.float()
    if left is not None:
        wide.mul_(left.view(-1, 1))
    if right is not None:
        wide.mul_(right)
    return wide.to(product.dtype)


def _times_scalar(product: Tensor, factor: Tensor) -> Tensor:
    """On a CPU a 0-dim factor is read as it is and the 1-element form is 30 times as slow; on a GPU a 0-dim factor is
    cast to the product's dtype first, one with a dimension is not."""
    if product.device.type == "cpu":
        return product.mul_(factor)
    return torch.mul(product, factor.view(1), out=product)
