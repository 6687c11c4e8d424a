"""What the number format does to each tensor, and what that does to each feed-forward's output.

Per cast (`layers.0.ffn.down.activations`; where a role's second GEMM reads a cast of its own, that one too:
`layers.0.ffn.down.wgrad.activations`): amax, scale, clipped and flushed fractions and SQNR, from the pass that casts
in the training step itself. A cast with a scale per row or block has no `quant_scale`. Per layer (`layers.0`):
`ffn_output_sqnr_db`, the feed-forward's output against that of the same weights and input without quantisers, in the
parameters' own dtype.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from harness.models.ffn import FeedForward
from harness.precision.linear import QuantizedLinear, quantizers
from harness.precision.result import NO_NOISE_DB
from harness.probes.base import Probe
from harness.spec import QuantizerSpec


class Quantization(Probe):
    name = "quantization"
    works_inside = True
    follows_rare_tokens = True

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []
        self._errors: dict[str, Tensor] = {}

    def begin(self) -> None:
        spec = self.run.spec
        self._active = spec.precision.recipe is not None
        if not self._active:
            reason = f"precision {spec.precision.name} has no quantisers"
            self.run.record.note("quant_sqnr_db", None, reason)
        elif any(_scales_are_many(quantizer.spec) for _, quantizer in quantizers(self.run.model)):
            reason = "casts with a scale per row or block have no single one"
            self.run.record.note("quant_scale", None, reason)

    def before_step(self, step: int) -> None:
        if not self._active:
            return
        for _, quantizer in quantizers(self.run.model):
            quantizer.collect = True
        for index, ffn in enumerate(self.run.model.feed_forwards()):
            if any(isinstance(module, QuantizedLinear) for module in ffn.modules()):

                def compare(
                    module: Any, args: tuple[Tensor, ...], output: Tensor, layer: int = index
                ) -> None:
                    with self.timed():
                        self._errors[f"layers.{layer}"] = self._output_error(module, args[0], output)

                self._handles.append(ffn.register_forward_hook(compare))

    @torch.no_grad()
    def _output_error(self, ffn: FeedForward, x: Tensor, output: Tensor) -> Tensor:
        """[signal, noise]: norms of the unquantised output and of the difference from it."""
        with self._unquantized(ffn), torch.autocast(x.device.type, enabled=False):
            reference = ffn.forward(x.detach().to(ffn.down.weight.dtype)).float()
        return torch.stack([reference.norm(), (output.detach().float() - reference).norm()])

    @contextmanager
    def _unquantized(self, ffn: FeedForward) -> Iterator[None]:
        """`ffn` without quantisers; Smooth-SwiGLU's running maxima stay as they are."""
        layers = [module for module in ffn.modules() if isinstance(module, QuantizedLinear)]
        training, ffn.training = ffn.training, False
        self.run.replaying = True
        for layer in layers:
            layer.forward = layer.high_precision  # type: ignore[method-assign]
        try:
            yield
        finally:
            for layer in layers:
                del layer.forward
            ffn.training = training
            self.run.replaying = False

    def after_backward(self, step: int, gradient_norm: float | Tensor | None) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if not self._active:
            return
        for name, quantizer in quantizers(self.run.model):
            quantizer.collect = False
            found, quantizer.statistics = quantizer.statistics, None
            if found is not None:
                self.run.record.measure(
                    step,
                    {
                        "quant_clipped_fraction": found.clipped_fraction,
                        "quant_flushed_fraction": found.flushed_fraction,
                        "quant_amax": found.amax,
                        "quant_scale": None if math.isnan(found.scale) else found.scale,
                        "quant_sqnr_db": found.sqnr_db,
                    },
                    scope=name,
                )
        for scope, error in self._errors.items():
            signal, noise = error.tolist()
            self.run.record.measure(step, {"ffn_output_sqnr_db": _decibel(signal, noise)}, scope=scope)
        self._errors.clear()


def _scales_are_many(spec: QuantizerSpec) -> bool:
    return spec.scaling in ("row", "block", "mx", "nvfp4")


def _decibel(signal: float, noise: float) -> float | None:
    """20 log10(signal / noise); None where the ratio means nothing."""
    if noise == 0:
        return NO_NOISE_DB
    ratio = signal / noise
    return 20 * math.log10(ratio) if ratio > 0 and math.isfinite(ratio) else None
