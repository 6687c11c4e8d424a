"""Operations: PyTorch's formulas for products, ours for the attention that it leaves out."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from harness.trace.live import Live

from .steps import make_spec, traced


def counted(backward: bool, heads: int = 4, kv_heads: int = 4) -> int:
    q = torch.randn(2, heads, 48, 16, requires_grad=True)
    k, v = (torch.randn(2, kv_heads, 48, 16, requires_grad=True) for _ in range(2))
    live = Live([], [])
    with live:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != kv_heads)
        forward = live.flops
        out.sum().backward()
    return live.flops - forward if backward else forward


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_flash_attention_is_two_products_forward_and_five_backward(kv_heads: int) -> None:
    assert counted(False, kv_heads=kv_heads) == 4 * 2 * 4 * 48 * 48 * 16
    assert counted(True, kv_heads=kv_heads) == 10 * 2 * 4 * 48 * 48 * 16


def test_pytorch_counts_flash_attention_on_a_cpu_as_nothing() -> None:
    """If this fails PyTorch has learnt it: leave our formulas away."""
    q, k, v = torch.randn(3, 2, 4, 48, 16)
    with FlopCounterMode(display=False) as flash:
        F.scaled_dot_product_attention(q, k, v, is_causal=True)
    with FlopCounterMode(display=False) as written, sdpa_kernel(SDPBackend.MATH):
        F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert flash.get_total_flops() == 0
    assert written.get_total_flops() == counted(False)


def test_recomputing_costs_what_is_recomputed() -> None:
    none, selective, full = (
        traced(make_spec(recompute=what)).flops for what in ("none", "selective", "full")
    )
    assert none is not None and selective is not None and full is not None
    attention = 2 * 4 * 8 * 4 * 32 * 32 * 8  # 2 layers of 4 b h s^2 d
    assert selective - none == attention
    assert none * 4 / 3 > full > selective
