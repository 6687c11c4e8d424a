"""Training loss (nats per token) and learning rate of each step, bad losses, rare tokens in the batch."""

from __future__ import annotations

import math

from harness.probes.base import Probe, StepValues


class Loss(Probe):
    name = "loss"

    def __init__(self) -> None:
        self._num_nonfinite = 0

    def after_step(self, step: int, values: StepValues) -> None:
        record = {"loss": values.loss, "learning_rate": values.learning_rate}
        if not math.isfinite(values.loss):
            self._num_nonfinite += 1
            record["num_nonfinite_loss"] = self._num_nonfinite
        if self.run.spec.data.rare_token_every:
            record["rare_tokens_in_batch"] = self.run.rare_tokens(step)
        self.run.record.measure(step, record)
