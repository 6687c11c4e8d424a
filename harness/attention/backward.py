"""The backward pass, with the row's delta taken from where one chooses.

delta = rowsum(dO * O) = rowsum(dP * P) in exact arithmetic, with dP = dO V^T and dS = P * (dP - delta). FlashAttention
takes the first, from the O that the forward pass rounded; its error then goes into every gradient of the row:
dQ_exact - dQ = scale * (delta - delta_exact) * (P K). (Qiu & Yao, arXiv 2510.04212, section 3.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from harness.attention.arithmetic import Arithmetic, to_bf16, unrounded
from harness.attention.tiled import Forward, scores
from harness.spec.attention import Delta


@dataclass(frozen=True)
class Gradients:
    """dq [..., rows, d], dk and dv [..., keys, d], delta [..., rows, 1], and P K [..., rows, d]."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    delta: Tensor
    pk: Tensor


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    result: Forward,
    dout: Tensor,
    how: Arithmetic,
    *,
    scale: float,
    delta: Delta = "do-o",
    visible: Tensor | None = None,
    bias: Tensor | None = None,
) -> Gradients:
    """Gradients of a forward pass `result` for the gradient `dout` of its O. P is made of LSE again; where `how` is
    narrow, P and dS are rounded to BF16 before their products, as the kernels do."""
    s = scores(q, k, scale, how, bias)
    p = torch.exp(s - result.lse)
    if visible is not None:
        p = p.masked_fill(~visible, 0.0)
    dp = dout @ v.mT
    d = _delta(delta, result, dout, p, dp, v, how)
    ds = p * (dp - d)
    narrow = to_bf16 if how.is_narrow else unrounded
    ds_narrow, p_narrow = narrow(ds), narrow(p)
    return Gradients(
        dq=scale * (ds_narrow @ k),
        dk=scale * (ds_narrow.mT @ q),
        dv=p_narrow.mT @ dout,
        delta=d,
        pk=p @ k,
    )


def _delta(
    which: Delta, result: Forward, dout: Tensor, p: Tensor, dp: Tensor, v: Tensor, how: Arithmetic
) -> Tensor:
    if which == "do-o":
        narrow = how.product  # the released code multiplies and adds up in BF16
        return narrow(narrow(dout * result.out).sum(-1, keepdim=True))
    if which == "do-o32":
        return (dout * result.unrounded).sum(-1, keepdim=True)
    if which == "do-o-fp64":
        return (dout.double() * result.out.double()).sum(-1, keepdim=True).to(p.dtype)
    if which == "dp-p":
        return (p * dp).sum(-1, keepdim=True)
    wide = dout.double() @ v.double().mT
    return (p.double() * wide).sum(-1, keepdim=True).to(p.dtype)


def exact_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    result: Forward,
    dout: Tensor,
    *,
    scale: float,
    delta: Delta = "do-o",
    visible: Tensor | None = None,
    bias: Tensor | None = None,
) -> Gradients:
    """The same in FP64 from an FP64 forward pass; there both deltas are one."""
    wide = [x.double() for x in (q, k, v)]
    wide_bias = None if bias is None else bias.double()
    return backward(
        wide[0],
        wide[1],
        wide[2],
        result,
        dout.double(),
        Arithmetic(flush_subnormals=False),
        scale=scale,
        delta=delta,
        visible=visible,
        bias=wide_bias,
    )
