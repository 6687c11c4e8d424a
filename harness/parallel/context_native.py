"""PyTorch's own context parallelism, on CUDA: its attention operators over DTensors that are cut along the sequence.

It passes keys and values round by all-gathers and computes the same rectangles as harness.parallel.context, whose
layout of a sequence (head and tail) is the one that its load balancing expects. Grouped heads of keys and values are
repeated, since its operators take as many of them as of queries. PyTorch marks the interface experimental; it has no
operators for a CPU.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

SEQUENCE = 2
"""The dimension of [batch, heads, tokens, d_head] that is cut."""


def product(mesh: DeviceMesh) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """A causal `Attention.product` over the ranks of `mesh`: q [batch, heads, tokens, d_head], k and v the same with
    their own heads, all local -> like q. From here on DTensors' attention is context parallel in this process."""
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.experimental import _attention

    _attention._cp_options.enable_load_balance = True
    _attention._enable_context_parallel_dispatcher()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        share = q.shape[1] // k.shape[1]
        if share > 1:
            k, v = k.repeat_interleave(share, dim=1), v.repeat_interleave(share, dim=1)
        parts = [DTensor.from_local(each, mesh, [Shard(SEQUENCE)], run_check=False) for each in (q, k, v)]
        whole = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        assert isinstance(whole, DTensor)
        out: Tensor = whole.to_local()
        return out

    return attend
