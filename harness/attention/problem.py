"""Rows whose largest score is tied, built from BF16 queries and keys so that every kernel gets the same scores.

Each row of a head has `num_ties` keys of its own whose score is exactly the row's maximum M. Every other key j lies
gap + s_j nats lower, s_j even in [0, spread]. With g = gap, and M = M_coarse + M_fine on BF16's grid each:

    feature      its own index    d-4          d-3       d-2    d-1
    q * scale    1                0            M_fine    1      M_coarse - g
    k_j          g + s_j (tied)   32 (tied)    1         -s_j   1

Everything is a multiple of 1/4 below 64 (M_fine of 2^-9 below 1/4): exact in BF16, and so are the scores in FP32. The
feature d-4, which no query looks at, gives the rows' P K a common direction: Qiu & Yao observe one, here it is put in.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from harness.attention.arithmetic import to_bf16
from harness.spec import AttentionSpec


@dataclass(frozen=True)
class Problem:
    """FP32 tensors of values that BF16 holds. q [heads, rows, d], k and v [heads, keys, d], dout and x like q."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    x: Tensor
    """Inputs that W_Q made q of: a common direction and noise (`token_similarity`)."""
    scale: float


SCALE = 0.125
"""Factor on q.k: exact, and the usual one for a head of 64."""
COMMON = 32.0


def build(spec: AttentionSpec, seed: int) -> Problem:
    """The problem of `spec`; the same seed gives the same bits."""
    generator = torch.Generator().manual_seed(seed)
    heads, rows, keys, width = spec.num_heads, spec.num_queries, spec.num_keys, spec.d_head
    head, row = torch.arange(heads)[:, None], torch.arange(rows)
    chosen = torch.rand(heads, keys, generator=generator).argsort(1)[:, : rows * spec.num_ties]
    owner = row.repeat_interleave(spec.num_ties).expand(heads, -1)
    below = torch.randint(0, round(4 * spec.spread) + 1, (heads, keys), generator=generator) / 4
    k = torch.zeros(heads, keys, width)
    k[..., -1] = k[..., -3] = 1.0
    k[..., -2] = -below
    k[head, chosen, owner] = spec.gap + below.gather(1, chosen)
    k[head, chosen, -4] = COMMON
    largest = _grid(spec.logit_low, spec.logit_high, (heads, rows), generator)
    coarse = (4 * largest).floor() / 4
    q = torch.zeros(heads, rows, width)
    q[:, row, row] = q[..., -2] = 1.0
    q[..., -1] = coarse - spec.gap
    q[..., -3] = largest - coarse
    q /= SCALE
    v = _signed(_magnitudes(spec, (heads, keys, width), generator), spec.negative_share, generator)
    if spec.tied_value_ratio != 1:
        v[head, chosen] *= spec.tied_value_ratio
    dout = _signed(
        torch.randn(heads, rows, width, generator=generator).abs(), spec.gradient_negative_share, generator
    )
    common = torch.randn(width, generator=generator)
    noise = torch.randn(heads, rows, width, generator=generator)
    x = spec.token_similarity**0.5 * common + (1 - spec.token_similarity) ** 0.5 * noise
    return Problem(q, k, to_bf16(v), to_bf16(dout), x, SCALE)


def _grid(low: float, high: float, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Even over [low, high], in steps of 2^-9."""
    return torch.randint(round(512 * low), round(512 * high) + 1, shape, generator=generator) / 512


def _magnitudes(spec: AttentionSpec, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if spec.values == "uniform":
        return 0.5 + 1.5 * torch.rand(shape, generator=generator)
    return torch.randn(shape, generator=generator).abs()


def _signed(magnitudes: Tensor, negative_share: float, generator: torch.Generator) -> Tensor:
    negative = torch.rand(magnitudes.shape, generator=generator) < negative_share
    return torch.where(negative, -magnitudes, magnitudes)
