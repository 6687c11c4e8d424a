"""Small texts between the ranks of a run, as bytes in tensors: PyTorch's own calls for objects pickle them."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist


def gathered(value: Any, device: torch.device | str = "cpu") -> list[Any]:
    """What JSON holds of each rank's `value`, in rank order, on every rank; of this process alone outside a group."""
    if not dist.is_initialized():
        return [json.loads(json.dumps(value))]
    from harness.parallel import recorder

    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    with recorder.control():
        sizes = torch.zeros(dist.get_world_size(), dtype=torch.int64, device=device)
        sizes[dist.get_rank()] = len(text)
        dist.all_reduce(sizes)
        largest = int(sizes.max())
        padded = torch.zeros(largest, dtype=torch.uint8, device=device)
        padded[: len(text)] = text
        everybody = torch.zeros(len(sizes) * largest, dtype=torch.uint8, device=device)
        dist.all_gather_into_tensor(everybody, padded)
    rows = everybody.cpu().view(len(sizes), largest)
    return [json.loads(bytes(row[:size].tolist())) for row, size in zip(rows, sizes.tolist(), strict=True)]
