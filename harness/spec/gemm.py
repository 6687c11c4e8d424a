"""Matrix products that are timed: their shapes and the kernels that compute them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from harness.spec.base import Frozen

KernelName = Literal["fp32", "bf16", "fp8-tensorwise", "fp8-rowwise", "fp8-block", "mxfp8", "nvfp4"]


@dataclass(frozen=True)
class Kernel:
    """One way a device multiplies, and how its operands are cast."""

    about: str
    casts: tuple[str, str] | None = None
    """Casts of the left [m, k] and the right [n, k] operand, as harness.spec.notation writes them; None: no cast."""
    multiple: tuple[int, int, int] = (1, 1, 1)
    """m, k and n must be multiples of these."""


KERNELS: dict[KernelName, Kernel] = {
    "fp32": Kernel("FP32 operands, no TF32"),
    "bf16": Kernel("BF16 operands, FP32 accumulation"),
    "fp8-tensorwise": Kernel(
        "E4M3 operands, one FP32 scale a tensor, from its own amax",
        ("e4m3:current", "e4m3:current"),
        (1, 16, 16),
    ),
    "fp8-rowwise": Kernel(
        "E4M3 operands, one FP32 scale a row of each",
        ("e4m3:row", "e4m3:row"),
        (1, 16, 16),
    ),
    "fp8-block": Kernel(
        "E4M3 operands, FP32 scales per 1 x 128 of the left and 128 x 128 of the right one",
        ("e4m3:block128", "e4m3:block128x128"),
        (1, 128, 128),
    ),
    "mxfp8": Kernel(
        "E4M3 operands, E8M0 scales per 1 x 32, rounded up",
        ("mxfp8:up", "mxfp8:up"),
        (1, 32, 16),
    ),
    "nvfp4": Kernel(
        "E2M1 operands, E4M3 scales per 1 x 16 under one FP32 scale a tensor",
        ("nvfp4", "nvfp4"),
        (1, 32, 16),
    ),
}
"""Kernels by name; which device has one says harness.gemm.available."""


class GemmSpec(Frozen):
    """One product, [m, k] by [k, n], and the kernel that computes it."""

    m: int = Field(default=0, ge=0)
    """Rows of the left operand: tokens, in a linear's forward pass."""
    k: int = Field(default=0, ge=0)
    """The contraction: features that go in."""
    n: int = Field(default=0, ge=0)
    """Columns of the product: features that come out."""
    kernel: KernelName = "bf16"
    rounds: int = Field(default=10, ge=2)
    """Times the whole measurement is repeated; each round is stored, the median counts."""
    fast_accumulation: bool = True
    """Let an FP8 kernel keep its sums in the tensor core instead of moving them into FP32 now and then, as frameworks
    do in the forward pass."""


def unfit(spec: GemmSpec) -> str | None:
    """Why a kernel cannot take a shape; None where it can."""
    kernel = KERNELS[spec.kernel]
    for name, size, multiple in zip("mkn", (spec.m, spec.k, spec.n), kernel.multiple, strict=True):
        if size < 1:
            return f"gemm.{name} must be at least 1 (got {size})"
        if size % multiple:
            return f"{spec.kernel} takes gemm.{name} in multiples of {multiple} (got {size})"
    return None
