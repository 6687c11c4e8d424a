"""RMSNorm and SwiGLU with hand-written derivatives.

Eager autograd spends much of a small model's step on the element-wise graph around the GEMMs; these two do each
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
        return (normed * weight).to(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        narrow, inverse, weight = ctx.saved_tensors
        normed = narrow.to(inverse.dtype)
        g = grads[0].to(inverse.dtype)
        product = g * normed
        dweight = product.reshape(-1, product.shape[-1]).sum(0)
        mean = (product.mul_(weight)).mean(-1, keepdim=True)
        dx = (g * weight).addcmul_(normed, mean, value=-1).mul_(inverse)
        return dx.to(narrow.dtype), dweight.to(weight.dtype), None, None


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
