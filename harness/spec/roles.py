"""Which GEMM of a linear reads which role's cast, and where one cast serves two of them. No torch.

A cast is made once and read by two GEMMs where its scale and grid are the same along either dimension: per-tensor
scales and square blocks, as Transformer Engine's kernels do it. All others are made again from the high-precision
tensor along each GEMM's own contraction. A GEMM with one unquantised operand is a high-precision product of a
dequantised tensor, so it may read the earlier cast whatever its blocks (Stable-SPAM's 4-bit set-up does).
"""

from __future__ import annotations

from typing import Literal

from harness.spec.precision import QuantizerSpec, RecipeSpec

GemmName = Literal["forward", "dgrad", "wgrad"]
Role = Literal["activations", "weights", "gradients"]

GEMMS: tuple[GemmName, ...] = ("forward", "dgrad", "wgrad")
ROLES: dict[GemmName, tuple[Role, Role]] = {
    "forward": ("activations", "weights"),
    "dgrad": ("gradients", "weights"),
    "wgrad": ("gradients", "activations"),
}
ALONG: dict[GemmName, tuple[int, int]] = {"forward": (1, 1), "dgrad": (1, 0), "wgrad": (0, 0)}
"""Dimension of the left and right operand that is summed over."""
FIRST: dict[Role, GemmName] = {"activations": "forward", "weights": "forward", "gradients": "dgrad"}
"""The GEMM that reads a role first; its cast is named by the role alone."""
SECOND: dict[Role, GemmName] = {"activations": "wgrad", "weights": "dgrad", "gradients": "wgrad"}


def spec_of(recipe: RecipeSpec, gemm: GemmName, role: Role) -> QuantizerSpec | None:
    """The cast that `gemm` wants of `role`."""
    return recipe.operands(gemm)[ROLES[gemm].index(role)]


def is_shared(recipe: RecipeSpec, role: Role) -> bool:
    """Whether the second GEMM that reads `role` takes what the first one read."""
    second = SECOND[role]
    first, wanted = spec_of(recipe, FIRST[role], role), spec_of(recipe, second, role)
    if first != wanted:
        return False
    if wanted is None:
        return True
    other = next(name for name in ROLES[second] if name != role)
    if spec_of(recipe, second, other) is None:
        return wanted.scaling != "row"  # its scales would stand inside this sum
    if wanted.hadamard or wanted.keep_top:
        return False
    across, along = wanted.block_shape or (0, 0)
    return wanted.scaling != "row" and across == along
