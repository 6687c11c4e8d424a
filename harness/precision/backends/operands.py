"""Operands of PyTorch's scaled products, from the very casts that the emulation multiplies.

A cast leaves numbers on its format's grid in FP32 or BF16, multiplied by their blocks' factors where blocks have some.
Here they become 8- or 4-bit codes of the same numbers, a conversion without rounding, beside those factors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from harness.precision.backends.requirements import Scheme, scheme_of
from harness.precision.result import CastResult
from harness.precision.scales import absolute_maximum, encode_scale, mx_scales, nvfp4_scales, to_blocks
from harness.spec import QuantizerSpec

DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
E2M1_BOUNDARIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Midpoints between neighbouring magnitudes of E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6."""


@dataclass(frozen=True)
class Operand:
    """[n, k], contraction last. What it stands for is codes * scale, per block, * outer."""

    codes: Tensor
    """float8 [n, k]; for NVFP4 the 4-bit codes of E2M1, one a byte, uint8 [n, k]."""
    scale: Tensor
    """FP32, the factor after the cast: [] (scheme tensor), [n] (row), else [n / across, k / along]."""
    scheme: Scheme
    block: tuple[int, int] | None = None
    """(across, along) of a scale."""
    outer: Tensor | None = None
    """NVFP4's FP32 number for the whole tensor."""

    @property
    def is_shared(self) -> bool:
        """Whether the transposed codes are the cast of the transposed tensor."""
        return self.scheme == "tensor" or (self.block is not None and self.block[0] == self.block[1])

    def transposed(self) -> Operand:
        """The same tensor for a product that contracts its other dimension."""
        if not self.is_shared:
            raise ValueError(f"{self.scheme} scales serve one contraction")
        scale = self.scale if self.scheme == "tensor" else self.scale.t()
        return replace(self, codes=self.codes.t().contiguous(), scale=scale)


def to_operand(result: CastResult, x: Tensor, spec: QuantizerSpec) -> Operand:
    """The operand of which `result` is the cast by `spec`; `x` [rows, cols] is the tensor as it entered the cast."""
    values, source = (result.values, x) if result.along == 1 else (result.values.t(), x.t())
    scheme = scheme_of(spec)
    if scheme in ("tensor", "row"):
        scale = torch.ones((), device=values.device) if result.inverse is None else result.inverse.float()
        return Operand(values.to(DTYPES[spec.format]).contiguous(), scale, scheme)
    scale, outer = block_scales(source, spec)
    grid = _undo(values, scale, spec)
    codes = e2m1_codes(grid) if scheme == "nvfp4" else grid.to(DTYPES[spec.format])
    return Operand(codes.contiguous(), scale, scheme, spec.block_shape, outer)


def block_scales(x: Tensor, spec: QuantizerSpec) -> tuple[Tensor, Tensor | None]:
    """(factor after the cast per block, FP32 [n / across, k / along]; NVFP4's factor for the tensor or None) that the
    cast of `x` [n, k], contraction last, works with."""
    x = x.detach().float()
    assert spec.block_shape is not None
    amax = to_blocks(x, spec.block_shape).abs().amax((1, 3))
    if spec.scaling == "mx":
        scales = mx_scales(amax, spec)
    elif spec.scaling == "nvfp4":
        scales = nvfp4_scales(amax, absolute_maximum(x))
    else:
        return encode_scale(amax, spec).reciprocal(), None
    assert scales.decode is not None
    return scales.decode, scales.inverse


def decoded(operand: Operand) -> Tensor:
    """The numbers that an operand stands for, FP32 [n, k]: those of the emulation, bit for bit."""
    if operand.codes.dtype == torch.uint8:
        magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device=operand.codes.device)
        wide = torch.cat((magnitudes, -magnitudes))[operand.codes.long()]
    else:
        wide = operand.codes.float()
    if operand.block is not None:
        wide = wide * spread(operand.scale, operand.block, wide.shape)
    elif operand.scheme == "row":
        wide = wide * operand.scale.view(-1, 1)
    else:
        wide = wide * operand.scale
    return wide if operand.outer is None else wide * operand.outer


def spread(scale: Tensor, block: tuple[int, int], shape: torch.Size | tuple[int, int]) -> Tensor:
    """Each scale over its block: [n, k]."""
    return scale.repeat_interleave(block[0], 0)[: shape[0]].repeat_interleave(block[1], 1)[:, : shape[1]]


def e2m1_codes(grid: Tensor) -> Tensor:
    """The 4-bit codes of E2M1 numbers, one a byte."""
    boundaries = torch.tensor(E2M1_BOUNDARIES, device=grid.device)
    return torch.bucketize(grid.abs(), boundaries).to(torch.uint8) | (
        torch.signbit(grid).to(torch.uint8) << 3
    )


def _undo(values: Tensor, scale: Tensor, spec: QuantizerSpec) -> Tensor:
    """Grid values of what the cast multiplied by its blocks' factors. The quotient errs by FP32's rounding, which the
    conversion to so few bits removes."""
    assert spec.block_shape is not None
    factor = spread(scale, spec.block_shape, values.shape)
    return torch.where(factor > 0, values.float() / factor, values.float())
