"""Quantisers: the cast of one operand, with what it remembers between steps.

A scale may come from the tensor itself (current, row, block, mx, nvfp4), from the maxima of earlier steps (delayed:
Micikevicius et al. 2022, Transformer Engine's DelayedScaling; one read, but a sudden outlier is clipped, and its
shadow stays as long as the history), or from nothing (none, static). The arithmetic is `harness.precision.cast`'s; here
live the amax history, its maximum over data-parallel ranks, and the seeds of stochastic rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, distributed, nn

from harness.precision.cast import CastResult, CastStatistics, cast
from harness.precision.formats import FloatFormat, find_format
from harness.precision.hadamard import transform
from harness.precision.noise import noise_seed
from harness.precision.scales import absolute_maximum, encode_scale
from harness.spec import QuantizerSpec


class Quantizer(nn.Module):
    """Casts one operand of one linear's GEMMs. Its history is a buffer, so a resumed run goes on with the same scales.

    `name` and `seed` enter the noise of stochastic rounding and nothing else.
    """

    def __init__(self, spec: QuantizerSpec, name: str = "", seed: int = 0) -> None:
        super().__init__()
        self.spec = spec
        self.format = find_format(spec.format)
        self.identity = (name, seed)
        self.step = 0
        """Enters the noise: the training loop sets it (`begin_step`), so a resumed step draws what it would have."""
        self.calls = 0
        self.in_forward = False
        """It casts in forward passes: when called within a backward pass, one is being computed again."""
        self.collect = False
        self.statistics: CastStatistics | None = None
        if spec.scaling == "delayed":
            self.register_buffer("amax_history", torch.zeros(spec.history))
            self.register_buffer("amax_now", torch.zeros(()))
        self.amax_history: Tensor
        self.amax_now: Tensor
        self._known: tuple[int, Tensor] | None = None

    def scale_for(self, amax: Tensor) -> Tensor:
        """Scale that brings `amax` (a scalar tensor) to the format's maximum; 1 where amax is 0 or not finite.

        Torch turns number / tensor into a product with the reciprocal, up to a unit in the last place from the
        quotient that `cast` takes. Results are stored that were made so, so it stays for the scales they had.
        """
        if self.spec.power_of_two:
            return encode_scale(amax, self.spec)
        usable = (amax > 0) & torch.isfinite(amax)
        scale = torch.where(usable, self.format.max / 2.0**self.spec.margin / amax, 1.0)
        return scale.clamp(2.0**-120, 2.0**120)

    def cast(self, x: Tensor, along: int = 1, compute: torch.dtype = torch.float32) -> CastResult:
        """`x` [rows, cols] on its grid; dimension `along` is the contraction of the GEMM that reads it.

        The values are in `compute` where that loses nothing, else in FP32.
        """
        spec = self.spec
        carrier = compute if spec.exact_in_bf16 else torch.float32
        if spec.hadamard:
            x = transform(x, spec.hadamard, along=along)
        scale: Tensor | None = None
        if spec.scaling == "delayed":
            scale = self._delayed_scale(x)
        elif spec.scaling == "current" and isinstance(self.format, FloatFormat):
            scale = self.scale_for(absolute_maximum(x))
        seed = self._next_seed() if spec.rounding == "stochastic" else None
        result = cast(x, spec, along=along, carrier=carrier, scale=scale, seed=seed, collect=self.collect)
        if spec.scaling == "delayed" and self.training:
            amax = absolute_maximum(x) if result.amax is None else result.amax
            torch.maximum(self.amax_now, amax, out=self.amax_now)
        if self.collect:
            self.statistics = result.statistics
        return result

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """`x` of any shape and float dtype -> (its values on the grid in FP32, 1/scale), for casts of whole tensors."""
        result = self.cast(x.reshape(1, -1) if x.dim() != 2 else x)
        inverse = torch.ones((), device=x.device) if result.inverse is None else result.inverse
        return result.values.view(x.shape), inverse

    def _delayed_scale(self, x: Tensor) -> Tensor:
        """The history's scale, worked out once per change of the history; before there is one, from the first tensor
        seen."""
        version = self.amax_history._version
        if self._known is None or self._known[0] != version or self._known[1].device != x.device:
            past = self.amax_history.max() if self.spec.amax == "max" else self.amax_history[0]
            if not bool(past > 0):
                return self.scale_for(absolute_maximum(x))
            self._known = (version, self.scale_for(past))
        return self._known[1]

    def _next_seed(self) -> int:
        """From the run's seed, the step, this quantiser's name and, unless ranks share their noise, the rank.
        Several casts within a step (micro-batches) differ; in evaluation nothing moves."""
        name, seed = self.identity
        rank = 0 if not _distributed() else distributed.get_rank()
        again = self.in_forward and torch._C._current_graph_task_id() != -1  # draws what it drew
        index = max(self.calls - again, 0)
        call = f"{name}/{index}" if index else name
        self.calls += self.training and not again
        return noise_seed(seed, self.step, call, None if self.spec.shared_noise else rank)

    def begin_step(self, step: int) -> None:
        """Call before the forward pass of training step `step`."""
        self.step, self.calls = step, 0

    @torch.no_grad()
    def end_step(self, amax: float | None = None) -> None:
        """Push this step's amax (`amax`, where ranks have agreed on one) into the history, after the optimizer."""
        self.begin_step(self.step + 1)
        if self.spec.scaling != "delayed":
            return
        now = float(self.amax_now) if amax is None else amax
        if math.isfinite(now) and now > 0:  # a NaN step must not poison the history
            self.amax_history.copy_(torch.roll(self.amax_history, 1))
            self.amax_history[0] = now
        self.amax_now.zero_()


@torch.no_grad()
def end_steps(every: Sequence[Quantizer]) -> None:
    """End the step of all quantisers: one collective, where there are ranks, makes their amax the largest of any rank.

    A NaN travels as infinity, since a collective's maximum may lose it; neither enters a history.
    """
    delayed = [quantizer for quantizer in every if quantizer.spec.scaling == "delayed"]
    amaxes: list[float] = []
    if delayed:
        stacked = torch.stack([quantizer.amax_now for quantizer in delayed]).nan_to_num_(nan=math.inf)
        if _distributed():
            distributed.all_reduce(stacked, op=distributed.ReduceOp.MAX)
        amaxes = stacked.tolist()
    for quantizer, amax in zip(delayed, amaxes, strict=True):
        quantizer.end_step(amax)
    for quantizer in every:
        if quantizer.spec.scaling != "delayed":
            quantizer.end_step()


def _distributed() -> bool:
    return distributed.is_available() and distributed.is_initialized()
