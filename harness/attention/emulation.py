"""A model's attention through the emulation, with ties put in where the spec asks for them.

Put in, as an attention sink would be: in one head of one layer the first keys are equal, all others' scores are lowered
by `gap` nats, and the head's values are negative. Every arm of a comparison gets the same; only the arithmetic differs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.attention.arithmetic import Arithmetic, arithmetic
from harness.attention.function import Rounding, TiledAttention
from harness.models.transformer import Transformer
from harness.spec import AttentionSpec
from harness.spec.attention import Delta

Watch = Callable[[Tensor, Rounding], None]
"""Called in each backward pass with the layer's input [batch, tokens, d_model]."""


@dataclass
class Emulation:
    """The softmax product of one layer."""

    how: Arithmetic
    delta: Delta
    num_ties: int = 0
    head: int = 0
    gap: float = 0.0
    watch: Watch | None = None

    def __call__(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """x [batch, tokens, d_model]: what q was made of; q [batch, heads, tokens, d], k and v the same with their
        own heads -> O [batch, heads, tokens, d], all FP32, causal."""
        share = q.shape[1] // k.shape[1]
        if share > 1:
            k, v = k.repeat_interleave(share, dim=1), v.repeat_interleave(share, dim=1)
        bias = None
        if self.num_ties:
            k, v, bias = self._with_ties(k, v)
        watch, seen = self.watch, x.detach()
        inform = None if watch is None else lambda rounding: watch(seen, rounding)
        out: Tensor = TiledAttention.apply(q, k, v, bias, self.how, self.delta, inform)
        return out

    def _with_ties(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        heads, tokens = k.shape[1:3]
        here = torch.zeros(heads, tokens, 1, dtype=torch.bool, device=k.device)
        here[self.head, : self.num_ties] = True
        head = torch.zeros(heads, 1, 1, dtype=torch.bool, device=k.device)
        head[self.head] = True
        bias = torch.zeros(heads, 1, tokens, device=k.device)
        bias[self.head, :, self.num_ties :] = -self.gap
        return torch.where(here, k[:, :, :1], k), torch.where(head, -v.abs(), v), bias


def with_stored_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal softmax(q k^T / sqrt(d)) v by three operations; scores [batch, heads, tokens, tokens] stay in memory."""
    share = q.shape[1] // k.shape[1]
    if share > 1:
        k, v = k.repeat_interleave(share, dim=1), v.repeat_interleave(share, dim=1)
    tokens = q.shape[2]
    later = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).triu_(1)
    scores = (q @ k.mT).mul_(q.shape[-1] ** -0.5).masked_fill_(later, float("-inf"))
    return torch.softmax(scores, dim=-1) @ v


def emulate(model: Transformer, spec: AttentionSpec) -> None:
    """Route the attention of every layer through the emulation; `kernel: default` leaves the model as it is, `eager`
    keeps all scores and probabilities in memory, as attention was done before flash kernels.

    Raises ValueError for a kernel that is not emulated, and for a layer or head that the model does not have.
    """
    if spec.kernel == "default":
        return
    if spec.kernel == "eager":
        for attention in model.attentions():
            attention.product = with_stored_scores
        return
    if not spec.is_emulated:
        raise ValueError(
            f"a model trains with the default, the eager or an emulated attention kernel, not {spec.kernel}"
        )
    for name, value, limit in (
        ("inject_layer", spec.inject_layer, len(model.layers)),
        ("inject_head", spec.inject_head, model.spec.num_heads),
    ):
        if spec.inject_ties and value >= limit:
            raise ValueError(f"{name} {value} is not below {limit}, what the model has")
    how = arithmetic(spec)
    for index, attention in enumerate(model.attentions()):
        ties = spec.inject_ties if index == spec.inject_layer else 0
        attention.emulation = Emulation(how, spec.delta, ties, spec.inject_head, spec.gap)
