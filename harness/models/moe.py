"""A mixture of experts in place of the feed-forward: a router sends each token to the `top_k` experts that suit it.

    p = softmax(router(x))            over all experts, FP32 or wider
    chosen = top-k of p + b           b: the routing bias that balances load without a loss; 0 without it
    w = softmax of the chosen logits  (Mixtral: Jiang et al. 2024; of one, p itself, as in Switch: else it would be 1)
    y = sum over chosen of w_i SwiGLU_i(x)

Experts are two fused weights, gate_up [experts, 2 d_ffn, d_model] and down [experts, d_model, d_ffn], so that sharing
them out over ranks cuts their first dimension. Tokens are sorted by expert, stably, and brought back by their place,
never by atomic additions: the same tokens give the same sums on one rank or many.

Dropless unless `capacity_factor` is given. Then an expert takes at most ceil(factor · tokens · top_k / experts) of
each *sequence's* pairs of token and choice (a sequence is GShard's group), first choices before second ones and
earlier tokens before later ones; pairs beyond that add nothing. What is dropped so does not depend on how a batch is
dealt out; context parallelism, which cuts sequences, is refused with it.

Balance: Switch Transformer's loss (Fedus et al. 2021, equation 4), experts · sum_i f_i P_i with f_i the share of
pairs that chose i and P_i the mean of p_i; 1 when balanced. f counts the tokens of all ranks (`total`); P is this
rank's, whose mean over ranks is the batch's, as gradients are averaged. The loss enters by its gradient alone (as in
Megatron-LM), so what is recorded as loss stays the cross-entropy, in a pipeline's middle stages too. With
accumulation or microbatches f is of one micro-step, as P is. Or DeepSeek-V3's bias (Wang et al. 2024): after each
step b_i grows by `bias_update` where expert i had less than the mean load, and falls where it had more. It is kept as
a whole number of such steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

from harness.models.functions import SwiGLU
from harness.spec import ModelSpec


class Experts(nn.Module):
    """SwiGLU feed-forwards side by side: all of a layer's, or those that lie on this rank."""

    def __init__(self, experts: int, d_model: int, d_ffn: int) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(experts, 2 * d_ffn, d_model))
        self.down = nn.Parameter(torch.empty(experts, d_model, d_ffn))

    def forward(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """rows [pairs, d_model], the first counts[0] for the first expert and so on -> the same shape."""
        gate_up: Tensor = self.gate_up
        down: Tensor = self.down
        if not torch.is_autocast_enabled(
            rows.device.type
        ):  # FSDP2's mixed precision gives narrow rows to whole weights
            gate_up, down = gate_up.to(rows.dtype), down.to(rows.dtype)
        parts = zip(rows.split(list(counts)), gate_up.unbind(0), down.unbind(0), strict=True)
        return torch.cat([F.linear(SwiGLU.apply(F.linear(x, up)), out) for x, up, out in parts])


Exchange = Callable[[Tensor, Sequence[int], Experts], Tensor]
"""Rows sorted by expert, how many each expert of the layer gets, and the experts at hand -> what the experts that the
rows are meant for, wherever they lie, make of them, in the rows' order."""


class MoE(nn.Module):
    """x [batch, tokens, d_model] -> the same shape."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        assert spec.moe is not None
        self.moe = spec.moe
        self.router = nn.Linear(spec.d_model, self.moe.experts, bias=False)
        self.experts = Experts(self.moe.experts, spec.d_model, spec.d_ffn)
        self.bias_steps: Tensor | None
        self.register_buffer("bias_steps", None)
        if self.moe.bias_update:
            self.bias_steps = torch.zeros(self.moe.experts, dtype=torch.int64)
        self.exchange: Exchange = _at_hand
        self.total: Callable[[Tensor], Tensor] = _alone
        """Adds up, over the ranks that share a batch, what each of them counted."""
        self.total_of_step: Callable[[Tensor], Tensor] = _alone
        """The same for the record of a step."""
        self.loss_scale = 1.0
        """What the training loop multiplies the loss by before its backward pass: 1 over the micro-steps that a
        step's gradients are added up from, times the scale that keeps FP16 gradients from underflowing."""
        self.removed = False
        self.tally: Tensor | None = None
        """Of this rank's tokens since the last step's end, FP64 [3, experts]: pairs that chose an expert, pairs that
        it took, sum of its probabilities."""
        self.last: Tensor | None = None
        """The tally of the last whole step over all ranks that share the batch."""

    def forward(self, x: Tensor) -> Tensor:
        if self.removed:
            return torch.zeros_like(x)
        batch, tokens, width = x.shape
        rows = x.reshape(-1, width)
        chosen, weights, probabilities = self._route(rows)
        load = _count(chosen, self.moe.experts)
        target = self._within_capacity(chosen.view(batch, tokens, -1)) if self.moe.capacity_factor else chosen
        taken = _count(target, self.moe.experts + 1)[:-1] if self.moe.capacity_factor else load
        if self.training:
            weights = self._balanced(weights, probabilities, load)
            self._remember(load, taken, probabilities)
        counts = self._even_counts(batch, tokens) if isinstance(x, FakeTensor) else taken.tolist()
        order = target.flatten().argsort(stable=True)[: sum(counts)]
        out = self.exchange(_Pick.apply(rows, order, self.moe.top_k), counts, self.experts)
        pairs = _Place.apply(out, order, chosen.numel()).view(-1, self.moe.top_k, width)
        y: Tensor = (pairs * weights.to(pairs.dtype).unsqueeze(-1)).sum(1)
        return y.view_as(x)

    def _route(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """rows [tokens, d_model] -> the experts chosen, best first, and their weights [tokens, top_k], and all
        probabilities [tokens, experts]."""
        wide = torch.promote_types(rows.dtype, torch.float32)
        with torch.autocast(rows.device.type, enabled=False):
            logits = F.linear(rows.to(wide), self.router.weight.to(wide))
            probabilities = logits.softmax(-1)
            score = probabilities.detach()
            if self.bias_steps is not None:
                score = score + self.moe.bias_update * self.bias_steps
            chosen = score.topk(self.moe.top_k).indices
            if self.moe.top_k == 1:
                return chosen, probabilities.gather(1, chosen), probabilities
            return chosen, logits.gather(1, chosen).softmax(-1), probabilities

    def capacity(self, tokens: int) -> int:
        """Pairs that an expert takes of a sequence of so many tokens."""
        return math.ceil(self.moe.capacity_factor * tokens * self.moe.top_k / self.moe.experts)

    def _within_capacity(self, chosen: Tensor) -> Tensor:
        """chosen [batch, tokens, top_k] -> the same, pairs that find their expert full sent to expert number
        `experts`, which is none."""
        batch, tokens, top_k = chosen.shape
        sequence = torch.arange(batch, device=chosen.device).view(-1, 1)
        key = (
            chosen.transpose(1, 2).flatten(1) + sequence * self.moe.experts
        )  # all first choices, then all second
        order = key.flatten().argsort(stable=True)
        count = _count(key, batch * self.moe.experts)
        start = (count.cumsum(0) - count).gather(0, key.flatten())
        place = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
        full = (place - start >= self.capacity(tokens)).view(batch, top_k, tokens).transpose(1, 2)
        return torch.where(full, self.moe.experts, chosen)

    def _balanced(self, weights: Tensor, probabilities: Tensor, load: Tensor) -> Tensor:
        """`weights` as they are, the auxiliary loss's gradient hung onto them."""
        if not self.moe.aux_loss:
            return weights
        load = self.total(load)
        share = load.to(probabilities.dtype) / load.sum()
        loss = self.moe.experts * (share * probabilities.mean(0)).sum()
        hung: Tensor = _HangOn.apply(weights, loss, self.moe.aux_loss * self.loss_scale)
        return hung

    @torch.no_grad()
    def _remember(self, load: Tensor, taken: Tensor, probabilities: Tensor) -> None:
        if torch._C._current_graph_task_id() != -1:  # computed again, within the backward pass
            return
        seen = torch.stack((load.double(), taken.double(), probabilities.sum(0, dtype=torch.float64)))
        self.tally = seen if self.tally is None else self.tally + seen

    def _even_counts(self, batch: int, tokens: int) -> list[int]:
        """Counts of a balanced router, for tensors without data."""
        each, more = divmod(batch * tokens * self.moe.top_k, self.moe.experts)
        most = batch * self.capacity(tokens) if self.moe.capacity_factor else each + 1
        return [min(most, each + (index < more)) for index in range(self.moe.experts)]


@torch.no_grad()
def end_step(layers: Sequence[MoE]) -> None:
    """After the optimizer: add the layers' tallies up over the ranks that share the batch (one call for all layers)
    and move the routing biases."""
    counted = [layer for layer in layers if layer.tally is not None]
    if not counted:
        return
    totals = counted[0].total_of_step(
        torch.stack([layer.tally for layer in counted if layer.tally is not None])
    )
    for layer, total in zip(counted, totals, strict=True):
        layer.last, layer.tally = total, None
        if layer.bias_steps is not None:
            load = total[0].round().long()
            layer.bias_steps += torch.sign(load.sum() - load * layer.moe.experts)


def _at_hand(rows: Tensor, counts: Sequence[int], experts: Experts) -> Tensor:
    out: Tensor = experts(rows, counts)
    return out


def _alone(counts: Tensor) -> Tensor:
    return counts


def _count(index: Tensor, size: int) -> Tensor:
    """How often each of 0 ... size - 1 stands in `index` (int64 [size])."""
    flat = index.flatten()
    return torch.zeros(size, dtype=torch.int64, device=flat.device).scatter_add_(
        0, flat, torch.ones_like(flat)
    )


class _Pick(torch.autograd.Function):
    """rows [tokens, width], pairs [n] (token · top_k + choice, none twice) -> [n, width], each pair's token."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, pairs: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(pairs)
        ctx.shape = (len(rows), top_k, rows.shape[1])
        return rows[pairs // top_k]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (pairs,) = ctx.saved_tensors
        tokens, top_k, width = ctx.shape
        spread = grads[0].new_zeros(tokens * top_k, width).index_copy_(0, pairs, grads[0])
        return spread.view(tokens, top_k, width).sum(1), None, None


class _Place(torch.autograd.Function):
    """out [n, width], pairs [n] -> [size, width] with each row at its pair and 0 at those that are not there."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, pairs: Tensor, size: int) -> Tensor:
        ctx.save_for_backward(pairs)
        return out.new_zeros(size, out.shape[1]).index_copy_(0, pairs, out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (pairs,) = ctx.saved_tensors
        return grads[0].index_select(0, pairs), None, None


class _HangOn(torch.autograd.Function):
    """`x` unchanged; in its backward pass the scalar `loss` gets the gradient `scale`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, scale: float) -> Tensor:
        ctx.scale, ctx.like = scale, (loss.dtype, loss.device)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        dtype, device = ctx.like
        return grads[0], torch.tensor(ctx.scale, dtype=dtype, device=device), None
