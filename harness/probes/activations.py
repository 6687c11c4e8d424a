"""Outliers of activations: the largest magnitude against the root mean square, per layer.

`layers.N.residual` is a block's output; `layers.N.ffn.hidden` is what the down projection is given, so for
the smooth forms of SwiGLU it is the smoothed tensor, the one that is cast.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from harness.models.ffn import FeedForward
from harness.probes.base import Probe


class Activations(Probe):
    name = "activations"
    works_inside = True
    follows_rare_tokens = True

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []
        self._found: dict[str, Tensor] = {}

    def before_step(self, step: int) -> None:
        for index, block in enumerate(self.run.model.layers):
            residual, hidden = f"layers.{index}.residual", f"layers.{index}.ffn.hidden"

            def after_block(module: Any, args: Any, output: Tensor, scope: str = residual) -> None:
                self._look(scope, output)

            def before_down(module: Any, args: tuple[Tensor, ...], scope: str = hidden) -> None:
                self._look(scope, args[0])

            self._handles.append(block.register_forward_hook(after_block))
            if isinstance(block.ffn, FeedForward):  # experts' inner widths see only the tokens sent to them
                self._handles.append(block.ffn.down.register_forward_pre_hook(before_down))

    @torch.no_grad()
    def _look(self, scope: str, tensor: Tensor) -> None:
        if self.run.replaying:
            return
        with self.timed():
            x = tensor.detach()
            low, high = x.aminmax()
            peak = torch.maximum(high, -low).float()
            rms = torch.linalg.vector_norm(x, dtype=torch.float32) / x.numel() ** 0.5
            self._found[scope] = torch.stack([peak, rms])

    def after_backward(self, step: int, gradient_norm: float | Tensor | None) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if not self._found:
            return
        for scope, (peak, rms) in zip(
            self._found, torch.stack(list(self._found.values())).tolist(), strict=True
        ):
            over = peak / rms if rms > 0 else None
            self.run.record.measure(
                step,
                {"activation_peak": peak, "activation_rms": rms, "activation_peak_over_rms": over},
                scope=scope,
            )
        self._found.clear()
