"""How evenly a router loads the experts: imbalance of a step's tokens over all ranks, layer by layer.

Of the last whole step, all micro-steps and all ranks that share the batch together (harness.models.moe adds them up).
Metrics are harness.ledger.experts's. With a pipeline, the layers of the first rank.
"""

from __future__ import annotations

from harness.ledger.experts import cv, entropy, gini, max_over_mean
from harness.models.moe import MoE
from harness.probes.base import Probe, StepValues


class Experts(Probe):
    name = "experts"

    def begin(self) -> None:
        self._active = self.run.spec.model.moe is not None
        if not self._active:
            reason = f"{self.run.spec.model.name} has dense feed-forwards, no experts"
            self.run.record.note("expert_load_max_over_mean", None, reason)

    def after_step(self, step: int, values: StepValues) -> None:
        for name, layer in self.run.model.named_modules():
            if isinstance(layer, MoE) and layer.last is not None:
                self._record(step, layer, name.removesuffix(".ffn"))

    def _record(self, step: int, layer: MoE, scope: str) -> None:
        assert layer.last is not None
        load, taken, probabilities = layer.last.tolist()
        pairs = sum(load)
        share_times_mean = sum(a * b for a, b in zip(load, probabilities, strict=True)) / pairs
        self.run.record.measure(
            step,
            {
                "expert_load_max_over_mean": max_over_mean(load),
                "expert_load_cv": cv(load),
                "expert_load_gini": gini(load),
                "expert_load_entropy": entropy(load),
                "expert_dropped_share": 1 - sum(taken) / pairs,
                "expert_balance_loss": len(load) * share_times_mean / sum(probabilities),
            },
            scope=scope,
        )
