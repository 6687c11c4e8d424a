"""What the feed-forward is worth: held-out loss with every feed-forward giving zero, against the loss as is.

A precision that ruins a block the model hardly uses costs no loss; this says how much there was to lose.
"""

from __future__ import annotations

from harness.models.ffn import FeedForward
from harness.models.moe import MoE
from harness.probes.base import Probe


class Ablation(Probe):
    name = "ablation"
    in_steps = False

    def begin(self) -> None:
        if self.run.first_step == 1:
            self._record(0)

    def finish(self, step: int) -> None:
        self._record(step)

    def _record(self, step: int) -> None:
        if not self.run.spec.val_tokens:
            self.run.record.note(
                "ffn_removal_cost", None, "val_tokens is 0: there is nothing to measure it on"
            )
            return
        model = self.run.model
        ffns: list[FeedForward | MoE] = [*model.feed_forwards(), *model.mixtures()]
        loss = self.run.validation_loss()
        for ffn in ffns:
            ffn.removed = True
        without = self.run.validation_loss()
        for ffn in ffns:
            ffn.removed = False
        self.num_recordings += 1
        self.run.record.measure(step, {"val_loss_without_ffn": without, "ffn_removal_cost": without - loss})
