"""What a cast returns: values, the factor that stands outside the product, and what the cast did to the tensor."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

NO_NOISE_DB = 300.0
"""Stands for an infinite ratio, which neither charts nor averages take."""


@dataclass(frozen=True)
class CastStatistics:
    """What one cast did to one tensor. Sums of parts of a tensor add up: `first + second`."""

    amax: float
    """Largest magnitude of the input; NaN if it holds one."""
    scale: float
    """The factor before the cast, where one serves the whole tensor; NaN where rows or blocks have their own."""
    nonzero: int
    clipped: int
    """Elements whose scaled magnitude was above the format's maximum, by more than the scale's own rounding."""
    flushed: int
    """Non-zero elements that became zero."""
    signal: float
    """Sum of x^2."""
    noise: float
    """Sum of (x - dequantised)^2, the dequantised in FP32."""

    @property
    def clipped_fraction(self) -> float:
        """Of the non-zero elements."""
        return self.clipped / max(self.nonzero, 1)

    @property
    def flushed_fraction(self) -> float:
        """Of the non-zero elements."""
        return self.flushed / max(self.nonzero, 1)

    @property
    def sqnr_db(self) -> float:
        """10 log10(signal / noise); NO_NOISE_DB where the cast was exact, NaN where it is undefined."""
        if self.noise == 0:
            return NO_NOISE_DB
        ratio = self.signal / self.noise
        return 10 * math.log10(ratio) if 0 < ratio < math.inf else math.nan

    def __add__(self, other: CastStatistics) -> CastStatistics:
        nan = math.isnan(self.amax) or math.isnan(other.amax)
        return CastStatistics(
            amax=math.nan if nan else max(self.amax, other.amax),
            scale=self.scale if self.scale == other.scale else math.nan,
            nonzero=self.nonzero + other.nonzero,
            clipped=self.clipped + other.clipped,
            flushed=self.flushed + other.flushed,
            signal=self.signal + other.signal,
            noise=self.noise + other.noise,
        )


@dataclass(frozen=True)
class CastResult:
    """`values` times `inverse` is the dequantised tensor."""

    values: Tensor
    """[rows, cols] in the carrier dtype, contiguous. On the format's grid under one scale per tensor or row (whole
    numbers for integer formats); already multiplied by the block's scale where blocks have their own."""
    inverse: Tensor | None
    """FP32 factor outside the product: a scalar, or [n] under row scaling (rows of x for along=1, columns for
    along=0); None: 1."""
    amax: Tensor | None
    """Largest magnitude of the input, an FP32 scalar; NaN if it holds one. None where an implementation had no cheap
    way to it."""
    statistics: CastStatistics | None = None
    along: int = 1

    @property
    def factor(self) -> Tensor | None:
        """`inverse` in a shape that multiplies `values`."""
        if self.inverse is None or self.inverse.dim() == 0:
            return self.inverse
        return self.inverse.unsqueeze(self.along)


def dequantize(result: CastResult) -> Tensor:
    """The tensor that the cast left of its input, [rows, cols] FP32."""
    values = result.values.float()
    return values if result.factor is None else values * result.factor
