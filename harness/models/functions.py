"""RMSNorm, rotary embedding and SwiGLU with hand-written derivatives.

Eager autograd spends much of a small model's step on the element-wise graph around the GEMMs; these do each
backward in a few in-place passes. Checked against autograd in the tests.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class RMSNorm(torch.autograd.Function):
    """y = x / sqrt(mean(x^2) + eps) * weight in FP32 or wider, then cast to `dtype`. (Zhang & Sennrich 2019.)"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        square = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_()
        inverse = square.div_(x.shape[-1]).add_(eps).rsqrt_()
        normed = wide * inverse
        ctx.save_for_backward(normed.to(x.dtype), inverse, weight)
        out: Tensor = (normed * weight).to(dtype)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        narrow, inverse, weight = ctx.saved_tensors
        width, wide = narrow.shape[-1], inverse.dtype
        normed = narrow.to(wide).view(-1, width)
        g = grads[0].reshape(-1, width).to(wide)
        product = g * normed
        dweight = product.sum(0)
        mean = (product @ weight.to(wide)).div_(width)
        dx = (g * weight).addcmul_(normed, mean[:, None], value=-1).mul_(inverse.view(-1, 1))
        return dx.view_as(narrow).to(narrow.dtype), dweight.to(weight.dtype), None, None


class Rotary(torch.autograd.Function):
    """RoPE (Su et al. 2021) on the fused projection, and its split.

    qkv [batch, tokens, heads + 2 * kv_heads, d_head] -> q, k (neighbouring pairs turned by `rotation`
    [tokens, 1, d_head / 2], complex; FP32 or wider) and v, each [batch, tokens, its heads, d_head]. The backward turns
    back and writes the three gradients into one tensor, where autograd would concatenate twice.
    """

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, rotation: Tensor, heads: int, kv_heads: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        qk, v = qkv.split((heads + kv_heads, kv_heads), dim=2)
        wide = torch.promote_types(qkv.dtype, torch.float32)
        turned = torch.view_as_real(_pairs(qk.to(wide)) * rotation).flatten(-2)
        ctx.save_for_backward(rotation)
        ctx.dtype = qkv.dtype
        q, k = turned.split((heads, kv_heads), dim=2)
        return q, k, v

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (rotation,) = ctx.saved_tensors
        # Products with stored scores hand the keys' gradient over transposed, and pairs must lie side by side.
        dq, dk, dv = (grad if grad.stride(-1) == 1 else grad.contiguous() for grad in grads)
        back = rotation.conj().resolve_conj()
        heads, kv_heads = dq.shape[2], dk.shape[2]
        out = torch.empty(*dq.shape[:2], heads + 2 * kv_heads, dq.shape[3], dtype=dq.dtype, device=dq.device)
        torch.mul(_pairs(dq), back, out=_pairs(out[:, :, :heads]))
        torch.mul(_pairs(dk), back, out=_pairs(out[:, :, heads : heads + kv_heads]))
        out[:, :, heads + kv_heads :] = dv
        return out.to(ctx.dtype), None, None, None


def _pairs(x: Tensor) -> Tensor:
    """[..., d] real as [..., d / 2] complex, without a copy."""
    return torch.view_as_complex(x.unflatten(-1, (-1, 2)))


class SwiGLU(torch.autograd.Function):
    """silu(gate) * up from the fused projection [..., 2 * d_ffn] (gate first). (Shazeer 2020.)"""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        activated = torch.nn.functional.silu(gate)
        ctx.save_for_backward(gate_up, activated)
        return activated * up

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        gate_up, activated = ctx.saved_tensors
        g = grads[0]
        gate, up = gate_up.chunk(2, dim=-1)
        out = torch.empty_like(gate_up)
        dgate, dup = out.chunk(2, dim=-1)
        torch.mul(activated, g, out=dup)
        torch.ops.aten.silu_backward.grad_input(g * up, gate, grad_input=dgate)
        return out
