"""Floating-point operations of one operator call, by PyTorch's own formulas and what they leave out.

PyTorch's FlopCounterMode knows no flash attention on a CPU and counts it as nothing; two formulas here add it, in
PyTorch's convention for the other attention kernels: two products forward, five backward (one of them the scores anew),
masked scores counted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

_aten = torch.ops.aten


def _flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[int, int]:
    """Operations of (q k^T, p v); q [batch, heads, tokens, d], k and v with their own heads and tokens."""
    batch, heads, tokens, width = query.shape
    keys = key.shape[2]
    pairs = batch * heads * tokens * keys
    return 2 * pairs * width, 2 * pairs * value.shape[3]


def _flash_forward(args: Any) -> int:
    scores, product = _flash(*args[:3])
    return scores + product


def _flash_backward(args: Any) -> int:
    """S = q k^T anew, dP = dO v^T, dV = P^T dO, dQ = dS k, dK = dS^T q."""
    scores, product = _flash(*args[1:4])
    return 3 * scores + 2 * product


_OWN = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _flash_forward,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _flash_backward,
}


def operations(func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """Operations of one call: two for each multiply-add of a matrix product; 0 for what is element-wise."""
    packet = func._overloadpacket
    if (own := _OWN.get(packet)) is not None:
        return own(args)
    formula = flop_registry.get(packet)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))
