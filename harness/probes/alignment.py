"""How far SwiGLU's two branches point the same way: w1 (linear) against w2 (gate), channel by channel.

Weight decay drives w1 and w2 of a saturated channel to +-each other, and the channel's output then grows
with the square of its input (Fishman et al. 2024, arXiv 2409.12517, section 4). The cosine alone does
little; the product of the norms says how large the output can become. An aged model's scales are included.
"""

from __future__ import annotations

import torch

from harness.probes.base import Probe, StepValues


class Alignment(Probe):
    name = "alignment"

    def begin(self) -> None:
        model = self.run.spec.model
        self._active = model.ffn != "gelu" and model.moe is None
        if not self._active:
            what = "a GELU feed-forward has no gate to align with" if model.moe is None else "of dense layers"
            self.run.record.note("alignment_cosine_mean", None, what)
        if self.run.first_step == 1:
            self._record(0)

    def after_step(self, step: int, values: StepValues) -> None:
        self._record(step)

    @torch.no_grad()
    def _record(self, step: int) -> None:
        if not self._active:
            return
        for layer, ffn in enumerate(self.run.model.feed_forwards()):
            gate, up = ffn.gate_up.weight.float().chunk(2)
            norms = torch.linalg.vector_norm(gate, dim=1) * torch.linalg.vector_norm(up, dim=1)
            cosine = (gate * up).sum(1).div_(norms.clamp_min(1e-30)).abs_()
            if ffn.up_scale is not None and ffn.gate_scale is not None:
                norms = norms * (ffn.up_scale * ffn.gate_scale).abs()
            mean, largest, product = torch.stack([cosine.mean(), cosine.max(), norms.max()]).tolist()
            self.run.record.measure(
                step,
                {
                    "alignment_cosine_mean": mean,
                    "alignment_cosine_max": largest,
                    "alignment_norm_product_max": product,
                },
                scope=f"layers.{layer}",
            )
