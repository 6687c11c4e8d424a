"""A tensor core's accumulator, imitated: a product whose running sum keeps few bits.

    acc <- cut(acc + a_k b_k)      k: the next `instruction_k` elements of the contraction
    out <- out + acc, acc <- 0     every `promote_every` elements, in FP32

`cut` keeps `mantissa_bits` bits of the significand, the leading one not counted, and drops what is below: towards
zero, as an aligned and truncated adder does. The products of one instruction are added in FP32, which holds sums of
FP8 products all but exactly. Source: DeepSeek-V3 (arXiv 2412.19437) section 3.3.2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from harness.spec import AccumulationSpec


def matmul(a: Tensor, b: Tensor, spec: AccumulationSpec) -> Tensor:
    """a [m, k] times b [k, n], both FP32 -> [m, n] FP32, summed as `spec` says."""
    k = a.shape[1]
    mask = cut_mask(spec.mantissa_bits)
    period = spec.promote_every or k
    total: Tensor | None = None
    partial = a.new_zeros(a.shape[0], b.shape[1])
    for start in range(0, k, period):
        end = min(start + period, k)
        if start:
            partial.zero_()
        for left in range(start, end, spec.instruction_k):
            right = min(left + spec.instruction_k, end)
            partial.addmm_(a[:, left:right], b[left:right])
            partial.view(torch.int32).bitwise_and_(mask)
        if period >= k:
            return partial
        total = partial.clone() if total is None else total.add_(partial)
    return partial if total is None else total


def cut_mask(mantissa_bits: int) -> int:
    """AND with an FP32's bits: its significand keeps `mantissa_bits` bits below the leading one."""
    return -(1 << (23 - mantissa_bits))
