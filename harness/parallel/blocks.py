"""Attention of some queries to some keys, with the logsumexp that lets several such parts be merged.

    forward    O = softmax(Q K^T / sqrt(d)) V and L = logsumexp(Q K^T / sqrt(d))
    backward   dQ, dK, dV of this part, given O and L of the *whole* row: P = exp(Q K^T / sqrt(d) - L) is then this
               part's share of the row's probabilities, and rowsum(dO * O) the row's own (Dao et al. 2022, algorithm
               4)

PyTorch's flash kernels do both: the CPU's in every float type, CUDA's in BF16 and FP16 with heads of up to 256.
Elsewhere (FP32 and FP64 on CUDA) scores are written out, as a kernel would not. Keys and values may have fewer heads
than queries (grouped-query attention).
"""

from __future__ import annotations

import torch
from torch import Tensor

aten = torch.ops.aten


def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """q [batch, heads, rows, d], k and v [batch, kv_heads, columns, d] -> out like q, logsumexp [batch, heads, rows].

    `causal`: row i sees columns 0 ... i; rows and columns are then equally many.
    """
    if _kernel(q) == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
        return out, lse
    if _kernel(q) == "cuda":
        out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
        return out, lse
    scores = _scores(q, k, causal)
    lse = scores.logsumexp(-1)
    probabilities = (scores - lse.unsqueeze(-1)).exp()
    return (probabilities @ _repeated(v, q)).to(q.dtype), lse


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v (each its shape) through this part; `out` and `lse` are of the whole rows."""
    if _kernel(q) == "cpu":
        dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal
        )
        return dq, dk, dv
    if _kernel(q) == "cuda":
        # No lengths: the sequences are not packed. The dropout's state is not looked at without dropout.
        state = torch.empty(2, dtype=torch.uint64, device=q.device)
        dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
            *(grad, q, k, v, out, lse.contiguous(), None, None, q.shape[2], k.shape[2]),
            *(0.0, causal, state, state),
        )
        return dq, dk, dv
    probabilities = (_scores(q, k, causal) - lse.unsqueeze(-1)).exp()
    wide_grad, scale = grad.to(lse.dtype), q.shape[-1] ** -0.5
    dv = probabilities.transpose(-1, -2) @ wide_grad
    dp = wide_grad @ _repeated(v, q).transpose(-1, -2)
    ds = probabilities * (dp - (wide_grad * out).sum(-1, keepdim=True)) * scale
    dq, dk = ds @ _repeated(k, q), ds.transpose(-1, -2) @ q.to(lse.dtype)
    return dq.to(q.dtype), _summed(dk, k), _summed(dv, v)


def _kernel(q: Tensor) -> str:
    if q.device.type == "cpu":
        return "cpu"
    fits = q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    return "cuda" if q.is_cuda and fits else "none"


def _scores(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    wide = torch.promote_types(q.dtype, torch.float32)
    scores: Tensor = (q.to(wide) * q.shape[-1] ** -0.5) @ _repeated(k, q).transpose(-1, -2)
    if causal:
        scores.masked_fill_(torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1), -torch.inf)
    return scores


def _repeated(kv: Tensor, q: Tensor) -> Tensor:
    """A head for each query head, FP32 or wider."""
    wide = kv.to(torch.promote_types(q.dtype, torch.float32))
    repeated: Tensor = wide.repeat_interleave(q.shape[1] // kv.shape[1], dim=1)
    return repeated


def _summed(grad: Tensor, kv: Tensor) -> Tensor:
    """The gradient of what `_repeated` repeated."""
    batch, _, columns, width = grad.shape
    return grad.view(batch, kv.shape[1], -1, columns, width).sum(2).to(kv.dtype)
