"""PyTorch's scaled products of two operands, and the layouts they read scales in.

    tensor  one FP32 number
    row     FP32 [m, 1] and [1, n]
    block   1x128: FP32 [n, k/128], column-major; 128x128: FP32 [k/128 rounded up to 4, n/128], column-major
    mx      E8M0 per 1x32 in tiles (`in_tiles`)
    nvfp4   E4M3 per 1x16 in the same tiles, and the tensor's FP32 number; codes two to a byte, the first one low

Source of the layouts: `aten/src/ATen/native/cuda/ScaledBlas.cpp` of PyTorch. On a CPU PyTorch has the first two alone,
as plain loops that serve tests.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from harness.precision.backends.errors import NotExpressibleError
from harness.precision.backends.operands import Operand
from harness.precision.backends.requirements import Scheme

MULTIPLES: dict[Scheme, int] = {"tensor": 16, "row": 16, "block": 128, "mx": 32, "nvfp4": 32}
"""What k, and n of the right operand, must divide by: cuBLAS's alignment, and whole blocks."""


def multiply(left: Operand, right: Operand, *, fast: bool = False) -> Tensor:
    """left [m, k] times right [n, k] transposed -> BF16 [m, n].

    `fast` lets tensor cores keep partial sums of FP8 products in their own narrower accumulator (operands scaled per
    tensor or row); without it they are moved to FP32 now and then. The contraction is padded with zeros where it does
    not divide. The right operand is handed over column-major, the one order that Hopper takes.
    """
    if {left.scheme, right.scheme} == {"tensor", "row"}:
        left, right = _as_rows(left), _as_rows(right)
    if left.scheme != right.scheme:
        raise NotExpressibleError(f"no product of {left.scheme} and {right.scheme} scales")
    short = -left.codes.shape[1] % MULTIPLES[left.scheme]
    if short:
        left, right = _padded(left, short), _padded(right, short)
    if left.scheme in ("tensor", "row"):
        scale_a, scale_b = left.scale, right.scale
        if left.scheme == "row":
            scale_a, scale_b = scale_a.view(-1, 1), scale_b.view(1, -1)
        return torch._scaled_mm(
            left.codes,
            right.codes.t(),
            scale_a=scale_a,
            scale_b=scale_b,
            out_dtype=torch.bfloat16,
            use_fast_accum=fast,
        )
    (scale_a, recipe_a, layout_a), (scale_b, recipe_b, layout_b) = arguments(left), arguments(right)
    product: Tensor = F.scaled_mm(
        _packed(left.codes),
        _packed(right.codes).t(),
        scale_a=scale_a,
        scale_recipe_a=recipe_a,
        scale_b=scale_b,
        scale_recipe_b=recipe_b,
        swizzle_a=layout_a,
        swizzle_b=layout_b,
        output_dtype=torch.bfloat16,
    )
    return product


def arguments(operand: Operand) -> tuple[Any, Any, Any]:
    """(scales, their kinds, their layouts) as `scaled_mm` takes them, for blocks."""
    kinds, layouts = F.ScalingType, F.SwizzleType
    if operand.scheme == "mx":
        return in_tiles(to_e8m0(_per_row(operand))), kinds.BlockWise1x32, layouts.SWIZZLE_32_4_4
    if operand.scheme == "nvfp4":
        return (
            [in_tiles(_per_row(operand).to(torch.float8_e4m3fn)), operand.outer],
            [kinds.BlockWise1x16, kinds.TensorWise],
            [layouts.SWIZZLE_32_4_4, layouts.NO_SWIZZLE],
        )
    if operand.block == (128, 128):  # its columns are block rows, their length a multiple of 4
        padded = F.pad(operand.scale, (0, -operand.scale.shape[1] % 4), value=1.0)
        return padded.contiguous().t(), kinds.BlockWise128x128, layouts.NO_SWIZZLE
    return operand.scale.t().contiguous().t(), kinds.BlockWise1x128, layouts.NO_SWIZZLE


def in_tiles(scales: Tensor) -> Tensor:
    """Scales [rows, blocks] of a byte each in the order cuBLAS reads them: tiles of 128 rows by 4 blocks, padded with
    zeros, in each 32 x 4 x 4, flat."""
    rows, blocks = scales.shape
    raw = F.pad(scales.view(torch.uint8), (0, -blocks % 4, 0, -rows % 128))
    tiles = raw.view(raw.shape[0] // 128, 128, raw.shape[1] // 4, 4).permute(0, 2, 1, 3)
    return tiles.reshape(-1, 4, 32, 4).transpose(1, 2).flatten().view(scales.dtype)


def to_e8m0(scales: Tensor) -> Tensor:
    """Powers of two from 2^-127 to 2^127 (FP32) as E8M0: their exponent fields are its codes."""
    return (scales.contiguous().view(torch.int32) >> 23).to(torch.uint8).view(torch.float8_e8m0fnu)


def _as_rows(operand: Operand) -> Operand:
    """One scale for the tensor, repeated for all its rows."""
    if operand.scheme == "row":
        return operand
    return Operand(operand.codes, operand.scale.expand(operand.codes.shape[0]).contiguous(), "row")


def _per_row(operand: Operand) -> Tensor:
    """Scales [n, k / along]: those of square blocks repeated for each row."""
    across = operand.block[0] if operand.block is not None else 1
    return operand.scale.repeat_interleave(across, 0)[: operand.codes.shape[0]]


def _padded(operand: Operand, columns: int) -> Operand:
    """Zeros beyond the contraction's end, and scales for whole blocks of them."""
    raw = F.pad(operand.codes.view(torch.uint8), (0, columns)).view(operand.codes.dtype)
    scale = operand.scale
    if operand.block is not None:
        wanted = raw.shape[1] // operand.block[1]
        scale = F.pad(scale, (0, wanted - scale.shape[1]), value=1.0)
    return Operand(raw, scale, operand.scheme, operand.block, operand.outer)


def _packed(codes: Tensor) -> Tensor:
    """E2M1 codes two to a byte, as the type that products take; others as they are."""
    if codes.dtype != torch.uint8:
        return codes
    return (codes[:, 0::2] | (codes[:, 1::2] << 4)).contiguous().view(torch.float4_e2m1fn_x2)
