"""The forward pass: a running softmax over tiles of keys, in a given arithmetic, and the exact result.

Shapes: q [..., rows, d], k and v [..., keys, d] with equal leading dimensions; O [..., rows, d], LSE [..., rows, 1].
`visible` [..., rows, keys] (broadcast; None: all) says which keys a row sees, `bias` [..., 1, keys] is added to scores.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from harness.attention.arithmetic import Arithmetic, to_bf16

SMALLEST_NORMAL = 2.0**-126
_MASKED = float("-inf")


@dataclass(frozen=True)
class Forward:
    """Result of a forward pass; everything FP32 (FP64 from `exact`)."""

    out: Tensor
    unrounded: Tensor
    """O of the same weights with every sum in FP32 and no rounding after it."""
    lse: Tensor
    """m + log l: what the backward pass makes P of again."""
    num_ones: Tensor
    """[..., rows, 1]: keys whose weight met V as exactly 1 in BF16, under the row's last maximum."""


def scores(q: Tensor, k: Tensor, scale: float, how: Arithmetic, bias: Tensor | None = None) -> Tensor:
    """scale * q k^T + bias, [..., rows, keys]."""
    raw = how.scores(how.scores(q @ k.mT) * scale)
    return raw if bias is None else how.scores(raw + bias)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    how: Arithmetic,
    *,
    scale: float,
    visible: Tensor | None = None,
    bias: Tensor | None = None,
) -> Forward:
    """FlashAttention's forward pass as `how` rounds it. A tile in which a row sees nothing leaves that row as it is:
    its maximum, its ties and its sums are those of the tiles it sees. A row that sees no key at all gets O = 0."""
    s = scores(q, k, scale, how, bias)
    if visible is not None:
        s = s.masked_fill(~visible, _MASKED)
    num_keys = s.shape[-1]
    tile = how.tile or num_keys
    m = torch.full_like(s[..., :1], _MASKED)
    total, out = torch.zeros_like(m), torch.zeros(*s.shape[:-1], v.shape[-1], dtype=s.dtype, device=s.device)
    clean_total, clean = torch.zeros_like(m), torch.zeros_like(out)
    num_ones = torch.zeros_like(m, dtype=torch.int64)
    for start in range(0, num_keys, tile):
        part, v_part = s[..., start : start + tile], v[..., start : start + tile, :]
        top = part.amax(-1, keepdim=True)
        new = torch.maximum(m, _without_ties(part, top, how) if how.beta else top)
        seen = new > _MASKED  # a row that has seen a key by now
        p = torch.where(seen, _exp(how.scores(part - new), how), 0.0)
        rescale = torch.where(seen & (m > _MASKED), _exp(how.scores(m - new), how), 0.0)
        weights = how.weights(p)
        row_sum = _row_sum(p, part == new, how)
        if how.least_row_sum:
            row_sum = torch.where(top > _MASKED, row_sum.clamp_min(how.least_row_sum), row_sum)
        total = how.state(rescale * total + row_sum)
        product = weights @ v_part
        out = how.state(how.product(rescale * out) + how.product(product))
        clean_total, clean = rescale * clean_total + row_sum, rescale * clean + product
        ones = (to_bf16(p) == 1).sum(-1, keepdim=True)
        num_ones = torch.where(new > m, ones, num_ones + ones)  # a new maximum rescales the old ones away
        m = new
    some = m > _MASKED
    out = torch.where(some, how.out(out / total), 0.0)
    clean = torch.where(some, clean / clean_total, 0.0)
    lse = torch.where(some, how.lse(m + total.log()), _MASKED)
    return Forward(out, clean, lse, num_ones)


def _exp(x: Tensor, how: Arithmetic) -> Tensor:
    p = torch.exp(x)
    return torch.where(p < SMALLEST_NORMAL, 0.0, p) if how.flush_subnormals else p


def _row_sum(p: Tensor, is_top: Tensor, how: Arithmetic) -> Tensor:
    if how.exp_zero_error:
        p = torch.where(is_top, p * (1 + how.exp_zero_error), p)
    return p.sum(-1, keepdim=True)


def _without_ties(part: Tensor, top: Tensor, how: Arithmetic) -> Tensor:
    """The repair: the tile's maximum r_m moved away where it is tied (r_s > 1), so that no weight is exactly 1."""
    tied = ((part >= top - how.tie_tolerance) & (part > _MASKED)).sum(-1, keepdim=True) > 1
    moved = torch.where(top > 0, how.scores(how.beta * top), torch.where(top < 0, 0.0, top))
    return torch.where(tied, moved, top)


def exact(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    visible: Tensor | None = None,
    bias: Tensor | None = None,
) -> Forward:
    """Softmax attention in FP64: what the inputs, taken as they are, give without any rounding."""
    s = q.double() @ k.double().mT * scale
    if bias is not None:
        s = s + bias.double()
    if visible is not None:
        s = s.masked_fill(~visible, _MASKED)
    lse = torch.logsumexp(s, dim=-1, keepdim=True)
    out = torch.nan_to_num(torch.exp(s - lse)) @ v.double()
    ones = (s == s.amax(-1, keepdim=True)).sum(-1, keepdim=True)
    return Forward(out, out, lse, ones)
