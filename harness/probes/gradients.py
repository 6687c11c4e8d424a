"""The gradient's global norm, as computed for clipping, and how many of its elements are not finite.

The norm is finite unless an element is not (or the sum of squares overflows), so elements are counted only
when it is not; of several ranks, in the first one's part of the model.
"""

from __future__ import annotations

import torch

from harness.probes.base import Probe


class Gradients(Probe):
    name = "gradients"

    @torch.no_grad()
    def after_backward(self, step: int, gradient_norm: float | torch.Tensor | None) -> None:
        gradients = self._gradients()
        norm = float(torch.nn.utils.get_total_norm(gradients) if gradient_norm is None else gradient_norm)
        num_nonfinite = 0
        if norm - norm != 0:  # NaN or infinite
            num_nonfinite = sum(int((~torch.isfinite(gradient)).sum()) for gradient in gradients)
        self.run.record.measure(step, {"gradient_norm": norm, "num_nonfinite_gradients": num_nonfinite})

    def _gradients(self) -> list[torch.Tensor]:
        """This rank's own as plain tensors, of all its pipeline stages, and FP32 main gradients where those count."""
        if self.run.strategy is not None:
            return [gradient for _, gradient in self.run.strategy.gradients()]
        return [p.grad for p in self.run.model.parameters() if p.grad is not None]
