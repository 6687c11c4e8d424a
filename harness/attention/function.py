"""The emulation as a differentiable function, for training through it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from harness.attention.arithmetic import Arithmetic, to_bf16
from harness.attention.backward import backward, exact_gradients
from harness.attention.tiled import exact, forward
from harness.spec.attention import Delta


@dataclass(frozen=True)
class Rounding:
    """What one backward pass of one layer made of delta, against FP64: both [batch, heads, rows, 1]."""

    delta_error: Tensor
    pk: Tensor
    """P K, [batch, heads, rows, d]: the direction in which delta's error moves the row's dQ."""
    num_ones: Tensor
    """Keys whose weight was exactly 1, [batch, heads, rows, 1]."""


class TiledAttention(torch.autograd.Function):
    """q, k, v [batch, heads, tokens, d] -> O, causal. `bias` [heads, 1, keys] is added to the scores."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        how: Arithmetic,
        delta: Delta,
        watch: Callable[[Rounding], None] | None,
    ) -> Tensor:
        if how.is_narrow:
            q, k, v = to_bf16(q), to_bf16(k), to_bf16(v)
        visible = _causal(q.shape[-2], k.shape[-2], q.device)
        scale = q.shape[-1] ** -0.5
        result = forward(q, k, v, how, scale=scale, visible=visible, bias=bias)
        ctx.save_for_backward(q, k, v)
        kept = replace(result, out=result.out.detach())  # the output itself would hold its own graph
        ctx.rest = kept, bias, visible, scale, how, delta, watch
        return result.out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v = ctx.saved_tensors
        result, bias, visible, scale, how, delta, watch = ctx.rest
        dout = to_bf16(grads[0]) if how.is_narrow else grads[0]
        options = {"scale": scale, "visible": visible, "bias": bias}
        found = backward(q, k, v, result, dout, how, delta=delta, **options)
        if watch is not None:
            ideal = exact(q, k, v, **options)
            wanted = exact_gradients(q, k, v, ideal, dout, **options)
            watch(Rounding((found.delta.double() - wanted.delta), wanted.pk, result.num_ones))
        return found.dq, found.dk, found.dv, None, None, None, None


def _causal(rows: int, keys: int, device: torch.device) -> Tensor:
    return torch.ones(rows, keys, dtype=torch.bool, device=device).tril(keys - rows)
