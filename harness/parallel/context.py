"""Context parallelism: each rank has a part of every sequence, and keys and values come to it from the others.

A sequence is cut into 2 cp pieces; rank i has pieces i and 2 cp - 1 - i, one behind the other (Llama 3, arXiv
2407.21783, section 3.3.2), so that under a causal mask every rank multiplies equally much: on whatever rank's keys it
looks, half of the products of its queries with them are left, and those form one full rectangle:

    keys of rank j = i   causal over both pieces, which lie in order
    j < i                all queries, first piece of the keys
    j > i                second piece of the queries, all keys

ring (Liu et al. 2023, arXiv 2310.01889): keys and values travel from rank to rank, and what the queries make of each
is merged by its logsumexp. all-gather (Llama 3): they are collected first. Both compute the same rectangles; in the
backward pass each is differentiated with the output and the logsumexp of the whole (Dao 2023's recurrence needs no
other state). Only the local keys and values are kept for it, so what a rank keeps falls as 1 / cp.

Collectives of one layer and micro-step, per rank, with S = 2 · b · (s / cp) · h_kv · d_head · e bytes of local keys
and values, b sequences, s tokens, h_kv key/value heads (never repeated), e bytes an element (FP32 on a CPU unless
FP64, where attention runs in it; the compute dtype on CUDA), and S_g the same with gradients' bytes, at least 4
(FP32):

                 forward                                 backward
    ring         send and recv of S, cp - 1 times        send and recv of S, cp - 1 times; of S_g, cp - 1 times
    all-gather   all_gather to cp · S                    all_gather to cp · S; reduce_scatter from cp · S_g

A rank so sends (cp - 1) S forward and (cp - 1) (S + S_g) backward either way. Recomputation (selective or full) runs
the forward collectives a second time. PyTorch's own (native: harness.parallel.context_native) makes the
same rotations, cp - 1 and 2 (cp - 1).

    from harness.parallel import context
    context.apply(model, mesh.over("cp"), "ring")
    at = context.local_positions(seq_len, cp, rank)        # model.loss(inputs[:, at], targets[:, at], at)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from harness.models.transformer import Transformer
from harness.parallel import blocks, context_native

Kind = Literal["ring", "all-gather", "native"]


def local_positions(tokens: int, size: int, rank: int) -> Tensor:
    """[tokens / size] int64: the positions that `rank` of `size` has of a sequence. ValueError where 2 size does not
    divide `tokens`."""
    if tokens % (2 * size):
        raise ValueError(f"a sequence of {tokens} tokens does not make {2 * size} equal pieces (2 cp)")
    pieces = torch.arange(tokens).view(2 * size, -1)
    return torch.cat((pieces[rank], pieces[2 * size - 1 - rank]))


def apply(model: Transformer, mesh: DeviceMesh, kind: Kind) -> None:
    """Make the model's attention look at the tokens of all ranks of the 1-D `mesh`. It must be given those of
    `local_positions`, and the positions themselves."""
    attend = context_native.product(mesh) if kind == "native" else product(mesh.get_group(), kind)
    for attention in model.attentions():
        attention.product = attend


def product(group: dist.ProcessGroup, kind: Kind) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """A causal `Attention.product` over the ranks of `group`: q [batch, heads, tokens, d_head], k and v the same with
    their own heads, all local -> like q."""
    function = _Ring if kind == "ring" else _AllGather

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = function.apply(q, k, v, group)
        return out

    return attend


_Part = tuple[slice, slice, bool]
"""Which of the local queries, which of the keys at hand, and whether under a mask."""


def _parts(q: Tensor, group: dist.ProcessGroup) -> Iterator[_Part]:
    """The rectangles of a rank's queries with its own keys, those of the rank before it, and so on round the ring."""
    whole, half = slice(None), q.shape[2] // 2
    for hop in range(group.size()):
        if hop == 0:
            yield whole, whole, True
        elif hop <= group.rank():  # the keys come from a lower rank
            yield whole, slice(0, half), False
        else:
            yield slice(half, None), whole, False


class _Merged:
    """Output and logsumexp over the keys seen so far, of all local queries, FP32 or wider."""

    def __init__(self, q: Tensor) -> None:
        wide = torch.promote_types(q.dtype, torch.float32)
        self.out = torch.zeros_like(q, dtype=wide)
        self.lse = torch.full(q.shape[:-1], -torch.inf, dtype=wide, device=q.device)

    def add(self, q: Tensor, held: Tensor, part: _Part) -> None:
        """What the queries make of the keys and values `held` [2, batch, kv_heads, tokens, d_head]."""
        rows, columns, causal = part
        out, lse = blocks.forward(q[:, :, rows], held[0][:, :, columns], held[1][:, :, columns], causal)
        before = self.lse[:, :, rows]
        after = torch.logaddexp(before, lse)
        seen = self.out[:, :, rows]
        seen.mul_((before - after).exp_().unsqueeze(-1))
        seen.addcmul_(out.to(seen.dtype), (lse - after).exp_().unsqueeze(-1))
        before.copy_(after)

    def finish(self, ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup) -> Tensor:
        out = self.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, self.lse)
        ctx.group = group
        return out


def _backward(
    saved: tuple[Tensor, ...], grad: Tensor, held: Tensor, part: _Part, into: tuple[Tensor, Tensor]
) -> None:
    """Add the gradients through one rectangle to those of the local queries and of the keys and values `held`."""
    (q, _, _, out, lse), (dq, dkv) = saved, into
    rows, columns, causal = part
    k, v = held[0][:, :, columns], held[1][:, :, columns]
    grad, q, out, lse = (whole[:, :, rows] for whole in (grad, q, out, lse))
    found = blocks.backward(grad, q, k, v, out, lse, causal)
    dq[:, :, rows] += found[0]
    dkv[0][:, :, columns] += found[1]
    dkv[1][:, :, columns] += found[2]


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup) -> Tensor:
        merged, held = _Merged(q), torch.stack((k, v))
        for hop, part in enumerate(_parts(q, group)):
            coming = _Pass(held, group) if hop < group.size() - 1 else None
            merged.add(q, held, part)
            if coming is not None:
                held = coming.wait()
        return merged.finish(ctx, q, k, v, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        saved, group = ctx.saved_tensors, ctx.group
        q, k, v, _, lse = saved
        grad, held = grads[0].contiguous(), torch.stack((k, v))
        dq, own = torch.zeros_like(q, dtype=lse.dtype), torch.zeros_like(held, dtype=lse.dtype)
        returning: _Pass | None = None  # gradients of others' keys and values, on their way home
        for hop, part in enumerate(_parts(q, group)):
            coming = _Pass(held, group) if hop < group.size() - 1 else None
            found = own if hop == 0 else torch.zeros_like(own)
            _backward(saved, grad, held, part, (dq, found))
            if hop:
                returning = _Pass(found if returning is None else found.add_(returning.wait()), group)
            if coming is not None:
                held = coming.wait()
        if returning is not None:
            own += returning.wait()
        return dq.to(q.dtype), own[0].to(k.dtype), own[1].to(v.dtype), None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup) -> Tensor:
        merged, gathered = _Merged(q), _gather(torch.stack((k, v)), group)
        for hop, part in enumerate(_parts(q, group)):
            merged.add(q, gathered[(group.rank() - hop) % group.size()], part)
        return merged.finish(ctx, q, k, v, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        saved, group = ctx.saved_tensors, ctx.group
        q, k, v, _, lse = saved
        grad, gathered = grads[0].contiguous(), _gather(torch.stack((k, v)), group)
        dq, found = torch.zeros_like(q, dtype=lse.dtype), torch.zeros_like(gathered, dtype=lse.dtype)
        for hop, part in enumerate(_parts(q, group)):
            other = (group.rank() - hop) % group.size()
            _backward(saved, grad, gathered[other], part, (dq, found[other]))
        own = torch.empty_like(found[0])
        dist.reduce_scatter_tensor(own, found.flatten(0, 1), group=group)
        return dq.to(q.dtype), own[0].to(k.dtype), own[1].to(v.dtype), None


def _gather(local: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[...] of each rank -> [cp, ...] on all."""
    out = local.new_empty((group.size(), *local.shape))
    dist.all_gather_into_tensor(out.flatten(0, 1), local, group=group)
    return out


class _Pass:
    """`sent` on its way to the next rank of the ring while the one before sends this rank something alike."""

    def __init__(self, sent: Tensor, group: dist.ProcessGroup) -> None:
        rank, size = group.rank(), group.size()
        self._sent, self._got = sent.contiguous(), torch.empty_like(sent)
        to, come = (dist.get_global_rank(group, (rank + step) % size) for step in (1, -1))
        self._works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self._sent, to, group),
                dist.P2POp(dist.irecv, self._got, come, group),
            ]
        )

    def wait(self) -> Tensor:
        """What came. The tensor sent must not be written to before."""
        for work in self._works:
            work.wait()
        return self._got
