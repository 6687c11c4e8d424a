"""Where a tiled attention rounds to BF16: one `Arithmetic` a variant.

All values are FP32 tensors; a value "in BF16" is one that lies on BF16's grid. Variants (Qiu & Yao, arXiv 2510.04212):

    paper             P rounded for its product with V; O and l rounded after each tile (their Algorithm 1)
    code              their released attention.py under BF16 autocast: scores, m, l, O and LSE live in BF16, each
                      product and each update of O is rounded by itself; a score within 1e-3 of the maximum is tied
    fp32-accumulate   as FlashAttention 2: only P is rounded, O once at the end
    fp32              nothing is rounded
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from harness.spec import AttentionSpec

Rounding = Callable[[Tensor], Tensor]


def to_bf16(x: Tensor) -> Tensor:
    """`x` (FP32) rounded to the nearest BF16, ties to even; still FP32."""
    return x.to(torch.bfloat16).to(x.dtype)


def unrounded(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True)
class Arithmetic:
    """What is rounded, and the options that change the arithmetic."""

    scores: Rounding = unrounded
    """q.k, its product with the scale, and the difference from the maximum."""
    weights: Rounding = unrounded
    """P on its way into P V."""
    product: Rounding = unrounded
    """P V of one tile, and O after it was rescaled: before they are added."""
    state: Rounding = unrounded
    """O and l after each tile."""
    out: Rounding = unrounded
    """O at the end."""
    lse: Rounding = unrounded
    tile: int = 0
    """Keys a tile; 0: the whole row."""
    tie_tolerance: float = 0.0
    least_row_sum: float = 0.0
    """Smallest l that a tile may add."""
    beta: float = 0.0
    exp_zero_error: float = 0.0
    flush_subnormals: bool = True

    @property
    def is_narrow(self) -> bool:
        """Whether anything is in BF16 at all."""
        return self.out is to_bf16


_VARIANTS = {
    "fp32": Arithmetic(),
    "paper": Arithmetic(weights=to_bf16, state=to_bf16, out=to_bf16),
    "code": Arithmetic(
        scores=to_bf16,
        weights=to_bf16,
        product=to_bf16,
        state=to_bf16,
        out=to_bf16,
        lse=to_bf16,
        tile=512,
        tie_tolerance=1e-3,
        least_row_sum=1e-10,
    ),
    "fp32-accumulate": Arithmetic(weights=to_bf16, out=to_bf16),
}


def arithmetic(spec: AttentionSpec) -> Arithmetic:
    """The arithmetic that an emulated kernel of `spec` means. Raises ValueError for a kernel that is not ours."""
    try:
        variant = _VARIANTS[spec.kernel]
    except KeyError:
        raise ValueError(
            f"kernel {spec.kernel} is not emulated; emulated ones are {', '.join(_VARIANTS)}"
        ) from None
    return replace(
        variant,
        tile=spec.tile or variant.tile,
        tie_tolerance=variant.tie_tolerance if spec.tie_tolerance is None else spec.tie_tolerance,
        beta=spec.beta,
        exp_zero_error=spec.exp_zero_error,
        flush_subnormals=spec.flush_subnormals,
    )
