"""What rounding in attention does to training: delta's error against FP64, summed over tokens and steps.

Qiu & Yao (arXiv 2510.04212): the error of W_Q's gradient is the sum over tokens of delta's error times (P K)^T X. Where
these terms point one way (coherence near 1) and delta's error keeps its sign, it piles up in W_Q and does not average
out. Recorded per head where attention is emulated; the sum counts the recorded steps alone.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from harness.attention.emulation import Emulation, Watch
from harness.attention.function import Rounding
from harness.attention.statistics import coherence
from harness.probes.base import Probe, StepValues


class Attention(Probe):
    name = "attention"
    works_inside = True

    def begin(self) -> None:
        self._sums: dict[str, float] = defaultdict(float)
        self._seen: dict[int, tuple[Tensor, Rounding]] = {}
        self._emulations: dict[int, Emulation] = {
            layer: attention.emulation
            for layer, attention in enumerate(self.run.model.attentions())
            if isinstance(attention.emulation, Emulation)
        }
        if not self._emulations:
            self.run.record.note("delta_error_sum", None, "attention is not emulated in this run")
        if self.run.first_step == 1:
            self._record_weights(0)

    def before_step(self, step: int) -> None:
        for layer, emulation in self._emulations.items():
            emulation.watch = self._watcher(layer)

    def _watcher(self, layer: int) -> Watch:
        def watch(x: Tensor, rounding: Rounding) -> None:
            self._seen[layer] = x, rounding

        return watch

    def after_backward(self, step: int, gradient_norm: float | torch.Tensor | None) -> None:
        for emulation in self._emulations.values():
            emulation.watch = None

    def after_step(self, step: int, values: StepValues) -> None:
        for layer, (x, rounding) in self._seen.items():
            self._record_rounding(step, layer, x, rounding)
        self._seen.clear()
        self._record_weights(step)

    def _record_rounding(self, step: int, layer: int, x: Tensor, rounding: Rounding) -> None:
        rows = x.flatten(0, 1)
        for head in range(rounding.delta_error.shape[1]):
            scope = f"layers.{layer}.heads.{head}"
            error = rounding.delta_error[:, head].flatten()
            self._sums[scope] += float(error.sum())
            self.run.record.measure(
                step,
                {
                    "delta_error_sum": self._sums[scope],
                    "coherence": coherence(error, rounding.pk[:, head].flatten(0, 1), rows),
                    "tied_one_share": float((rounding.num_ones[:, head] > 1).double().mean()),
                },
                scope=scope,
            )

    @torch.no_grad()
    def _record_weights(self, step: int) -> None:
        """Spectral norm of each head's rows of W_Q."""
        for layer, attention in enumerate(self.run.model.attentions()):
            width = attention.d_head
            query = attention.qkv.weight[: attention.num_heads * width].float()
            if not bool(query.isfinite().all()):
                continue  # the next loss is not finite either and ends the run
            norms = torch.linalg.matrix_norm(query.unflatten(0, (-1, width)), ord=2)
            for head, norm in enumerate(norms.tolist()):
                self.run.record.measure(
                    step, {"weight_spectral_norm": norm}, scope=f"layers.{layer}.heads.{head}.query"
                )
