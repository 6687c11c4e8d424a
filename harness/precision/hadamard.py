"""Random Hadamard transform along a GEMM's contraction: outliers are spread over their block before the cast.

Each block v of `size` elements becomes v S H / sqrt(size), with S a fixed diagonal of signs and H Sylvester's
Hadamard matrix. S H / sqrt(size) is orthogonal, so a product whose two operands are both transformed along its
contraction is unchanged, and nothing needs to be undone (Abecassis et al. 2025, arXiv 2509.25149: size 16, operands of
the weight gradient only, one sign vector for all layers and steps).

The transform runs in FP32. Elements past the last whole block are left as they are, on both operands alike.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""The fixed signs of Transformer Engine's NVFP4 recipe (get_wgrad_sign_vector); repeated for larger blocks."""


def transform(x: Tensor, size: int, *, along: int) -> Tensor:
    """`x` [rows, cols], any float dtype -> FP32 of the same shape, each block of `size` along dimension `along`
    transformed. `size` is a power of two; 0 or 1 gives `x` in FP32."""
    wide = x.float()
    whole = x.shape[along] // size * size if size > 1 else 0
    if not whole or not x.numel():
        return wide
    head = wide.narrow(along, 0, whole).unflatten(along, (-1, size))
    basis = matrix(size, x.device)
    turned: Tensor = (head @ basis if along == 1 else basis.t() @ head).flatten(along, along + 1)
    if whole == x.shape[along]:
        return turned
    return torch.cat((turned, wide.narrow(along, whole, x.shape[along] - whole)), dim=along)


@cache
def matrix(size: int, device: torch.device) -> Tensor:
    """S H / sqrt(size), [size, size] FP32: orthogonal; a row vector is multiplied from the left."""
    h = torch.ones(1, 1)
    while len(h) < size:
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)), 0)
    signs = torch.tensor([SIGNS[i % len(SIGNS)] for i in range(size)], dtype=torch.float32)
    basis: Tensor = signs[:, None] * h / size**0.5
    return basis.to(device)
