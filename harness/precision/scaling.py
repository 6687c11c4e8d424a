"""Quantisers: from a tensor to its values on a narrow grid and the scale that maps them back.

current   scale from the tensor's own absolute maximum: two reads, never stale.
delayed   scale from the maxima of earlier steps (Micikevicius et al. 2022; Transformer Engine's DelayedScaling):
          one read, but a sudden outlier is clipped, and its shadow stays as long as the history.
none      scale 1.

A quantiser returns `(q, inverse_scale)`: q lies on the format's grid, so it is exact in BF16 as well as FP32, and
the GEMM of two such tensors is the GEMM that FP8 hardware does; the scales multiply its output.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from harness.precision.formats import FORMATS
from harness.precision.rounding import round_to
from harness.spec import QuantizerSpec

SCALE_ROUNDING = 2.0**-22
"""amax * (max / amax) may come out a unit in the last place above max: that element was not clipped."""

NO_NOISE_DB = 300.0
"""Stands for an infinite ratio, which neither charts nor averages take."""


@dataclass(frozen=True)
class CastStatistics:
    """What one cast did to one tensor; fractions are of its non-zero elements."""

    amax: float
    scale: float
    clipped_fraction: float
    """Elements whose scaled magnitude was above the format's maximum, by more than the scale's own rounding."""
    flushed_fraction: float
    """Non-zero elements that became zero."""
    sqnr_db: float
    """10 log10(sum x^2 / sum (x - dequantised)^2); NO_NOISE_DB where the cast was exact, NaN where it is undefined."""


class Quantizer(nn.Module):
    """Casts one role of one linear. Its history is a buffer, so a resumed run continues with the same scales."""

    def __init__(self, spec: QuantizerSpec) -> None:
        super().__init__()
        self.spec = spec
        self.format = FORMATS[spec.format]
        self.collect = False
        self.statistics: CastStatistics | None = None
        if spec.scaling == "delayed":
            self.register_buffer("amax_history", torch.zeros(spec.history))
            self.register_buffer("amax_now", torch.zeros(()))
        self.amax_history: Tensor
        self.amax_now: Tensor

    def scale_for(self, amax: Tensor) -> Tensor:
        """Scale that brings `amax` (a scalar tensor) to the format's maximum; 1 where amax is 0 or not finite."""
        usable = (amax > 0) & torch.isfinite(amax)
        scale = torch.where(usable, self.format.max / 2.0**self.spec.margin / amax, 1.0)
        if self.spec.power_of_two:
            scale = torch.exp2(torch.floor(torch.log2(scale)))
        return scale.clamp(2.0**-120, 2.0**120)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """`x` (any float dtype and shape) -> (FP32 tensor on the format's grid, scalar 1/scale)."""
        given, x = x, x.float()
        if self.spec.scaling == "none":
            scale = torch.ones((), device=x.device)
        else:
            low, high = x.aminmax() if x.numel() else (x.new_zeros(()), x.new_zeros(()))
            amax = torch.maximum(-low, high)
            scale = self.scale_for(self._reference_amax(amax))
        own = x is not given and not self.collect  # a copy made here, and nobody will compare with it
        scaled = x.mul_(scale) if own else x * scale
        q = round_to(scaled, self.format)
        if self.collect:
            self.statistics = self._measure(x, scaled, q, scale)
        return q, scale.reciprocal()

    def _reference_amax(self, amax: Tensor) -> Tensor:
        if self.spec.scaling == "current":
            return amax
        if self.training:
            self.amax_now.copy_(torch.maximum(self.amax_now, amax))
        past = self.amax_history.max() if self.spec.amax == "max" else self.amax_history[0]
        return torch.where(past > 0, past, amax)  # no history yet: calibrate on the first tensor seen

    @torch.no_grad()
    def end_step(self) -> None:
        """Push this step's amax into the history. Call once a training step, after the optimizer."""
        if self.spec.scaling != "delayed":
            return
        now = self.amax_now
        if bool(torch.isfinite(now)) and bool(now > 0):  # a NaN step must not poison the history
            self.amax_history.copy_(torch.roll(self.amax_history, 1))
            self.amax_history[0] = now
        self.amax_now.zero_()

    def _measure(self, x: Tensor, scaled: Tensor, q: Tensor, scale: Tensor) -> CastStatistics:
        nonzero = max(int(torch.count_nonzero(x)), 1)
        clipped = int((scaled.abs() > self.format.max * (1 + SCALE_ROUNDING)).sum())
        flushed = int(((q == 0) & (x != 0)).sum())
        x64 = x.double()
        noise = float((x64 - q.double() / scale.double()).square().sum())
        signal = float(x64.square().sum())
        sqnr = NO_NOISE_DB if noise == 0 else 10 * math.log10(signal / noise) if signal > 0 else math.nan
        return CastStatistics(
            amax=float(x.abs().max()) if x.numel() else 0.0,
            scale=float(scale),
            clipped_fraction=clipped / nonzero,
            flushed_fraction=flushed / nonzero,
            sqnr_db=sqnr,
        )
