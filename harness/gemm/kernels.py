"""The products themselves: PyTorch's matrix product, and its scaled one for narrow operands.

    y [m, n] = x [m, k] · w [n, k]^T, BF16 (FP32 for the fp32 kernel)

Layouts of scales are those of PyTorch's tests of scaled products: 1 x 128 scales lie with the rows running fastest,
128 x 128 scales with the blocks of k running fastest and padded to four, MX and NVFP4 scales in tiles of 32 x 4 x 4.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import ScalingType, SwizzleType, scaled_mm

from harness.gemm.operands import QUANTIZERS, Operand, operand_of
from harness.precision.backends.products import in_tiles
from harness.spec.gemm import KernelName


def quantize(name: KernelName, x: Tensor, w: Tensor) -> tuple[Operand, Operand]:
    """x [m, k] and w [n, k] as the operands of a kernel that casts."""
    left, right = QUANTIZERS[name]
    return operand_of(left(x)), operand_of(right(w))


def ready(name: KernelName, left: Operand, right: Operand) -> tuple[Operand, Operand]:
    """The operands with their scales laid out as the kernel reads them: part of the cast's cost."""
    if name == "fp8-rowwise":
        return left, Operand(right.codes, (right.scales[0].t(),))
    if name == "fp8-block":
        rows_first = left.scales[0].t().contiguous().t()
        blocks = right.scales[0]
        padded = functional.pad(blocks, (0, -blocks.shape[1] % 4)).t()
        return Operand(left.codes, (rows_first,)), Operand(right.codes, (padded,))
    if name in ("mxfp8", "nvfp4"):
        return tuple(Operand(_packed(o.codes), (in_tiles(o.scales[0]), *o.scales[1:])) for o in (left, right))  # type: ignore[return-value]
    return left, right


def multiply(name: KernelName, left: Operand, right: Operand, *, fast_accumulation: bool = True) -> Tensor:
    """The scaled product of operands that `ready` gave, [m, n] BF16."""
    if name in ("fp8-tensorwise", "fp8-rowwise"):
        return torch._scaled_mm(
            left.codes,
            right.codes.t(),
            scale_a=left.scales[0],
            scale_b=right.scales[0],
            out_dtype=torch.bfloat16,
            use_fast_accum=fast_accumulation,
        )
    left_type, right_type = _SCALINGS[name]
    swizzle = [SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE] if name in ("mxfp8", "nvfp4") else None
    given = None if swizzle is None else swizzle[: len(left.scales)]
    return scaled_mm(
        left.codes,
        right.codes.t(),
        list(left.scales),
        left_type,
        list(right.scales),
        right_type,
        swizzle_a=given,
        swizzle_b=given,
        output_dtype=torch.bfloat16,
    )


_SCALINGS = {
    "fp8-block": ([ScalingType.BlockWise1x128], [ScalingType.BlockWise128x128]),
    "mxfp8": ([ScalingType.BlockWise1x32], [ScalingType.BlockWise1x32]),
    "nvfp4": (
        [ScalingType.BlockWise1x16, ScalingType.TensorWise],
        [ScalingType.BlockWise1x16, ScalingType.TensorWise],
    ),
}


def _packed(codes: Tensor) -> Tensor:
    return codes.view(torch.float4_e2m1fn_x2) if codes.dtype == torch.uint8 else codes
