"""Other people's kernels, each called by name with BF16 tensors; a kernel that is not here is an error that says so.

PyTorch's are chosen with `sdpa_kernel`; flash-attn 2 and 3 are packages. On a CPU PyTorch has `flash` and `math`.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from harness.run import Skipped

_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "math": SDPBackend.MATH,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}

_NOT_HERE = ("No available kernel", "No viable backend", "not supported")
"""What PyTorch's error says where a backend does not take these tensors on this device."""


def attend(kernel: str, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor | None]:
    """O [heads, rows, d] and LSE [heads, rows, 1] (None where the kernel does not give it) of BF16 tensors
    [heads, rows or keys, d], no mask. Raises harness.run.Skipped where the kernel cannot run here."""
    if kernel == "eager":
        p = torch.softmax(q @ k.mT * scale, dim=-1)
        return p @ v, None
    if kernel in _BACKENDS:
        return _torch(kernel, q, k, v, scale)
    if kernel in ("fa2", "fa3"):
        return _package(kernel, q, k, v, scale)
    raise ValueError(f"{kernel} is not a native kernel; those are eager, {', '.join(_BACKENDS)}, fa2, fa3")


def _torch(kernel: str, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor | None]:
    batch = [x.unsqueeze(0) for x in (q, k, v)]
    try:
        with sdpa_kernel(_BACKENDS[kernel]):
            out = scaled_dot_product_attention(batch[0], batch[1], batch[2], scale=scale)
    except RuntimeError as error:
        if not any(mark in str(error) for mark in _NOT_HERE):
            raise
        raise Skipped(
            f"PyTorch's {kernel} attention does not run on {q.device.type} for these tensors"
        ) from None
    return out[0], _log_sum_exp(kernel, batch, scale)


def _log_sum_exp(kernel: str, batch: list[Tensor], scale: float) -> Tensor | None:
    """LSE as the kernel saves it for its backward pass; the public call does not return it."""
    if kernel != "flash":
        return None
    if batch[0].device.type == "cpu":
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*batch, scale=scale)
    else:
        found = torch.ops.aten._scaled_dot_product_flash_attention(*batch, scale=scale)
    lse: Tensor = found[1]
    return lse[0].unsqueeze(-1).float()


def _package(kernel: str, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor | None]:
    module = {"fa2": "flash_attn", "fa3": "flash_attn_interface"}[kernel]
    if q.device.type != "cuda":
        raise Skipped(f"{module} runs on CUDA devices alone; set device: cuda")
    try:
        call: Callable[..., Any] = importlib.import_module(module).flash_attn_func
    except ImportError:
        raise Skipped(f"the package {module} is not installed") from None
    batch = [x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)]  # [1, tokens, heads, d]
    options = {"return_attn_probs": True} if kernel == "fa2" else {}
    found = call(*batch, softmax_scale=scale, **options)
    out, lse = (found[0], found[1]) if isinstance(found, tuple) else (found, None)
    return out[0].transpose(0, 1), None if lse is None else lse[0].unsqueeze(-1).float()


def sum_of_equal(kernel: str, num_keys: int, width: int, device: torch.device) -> float | None:
    """sum(exp(0)) / n - 1 of a row of `num_keys` equal scores, from the kernel's LSE; 0 where exp(0) is 1."""
    q, k, v = (
        torch.zeros(1, n, width, dtype=torch.bfloat16, device=device) for n in (16, num_keys, num_keys)
    )
    _, lse = attend(kernel, q, k, v, 1.0)
    return None if lse is None else float(torch.expm1(lse.double() - math.log(num_keys)).mean())
