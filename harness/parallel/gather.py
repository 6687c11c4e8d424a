"""Whole parameters from the parts that ranks hold: for checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from harness.parallel import norm, recorder, tensor
from harness.parallel.mesh import Mesh
from harness.run import COMPUTE_DTYPES
from harness.spec import Axis

if TYPE_CHECKING:
    from harness.parallel.strategy import Strategy


@torch.no_grad()
def weights(strategy: Strategy) -> dict[str, Tensor]:
    """The whole model's parameters by name, on every rank; all ranks call this. Tied names come once."""
    own = dict(strategy.named_parameters())
    with recorder.paused():
        return {name: _whole(strategy, name, own.get(name)) for name in strategy.shapes}


def _whole(strategy: Strategy, name: str, own: Tensor | None) -> Tensor:
    """FSDP2's shards, then the parts of tp and ep, then whichever pipeline stage has it."""
    mesh = strategy.mesh
    whole: Tensor | None = None
    if own is not None:
        whole = own.full_tensor() if hasattr(own, "full_tensor") else own.detach()
        if mesh.spec.tp > 1 and tensor.is_cut(name):
            whole = tensor.join(name, _parts(whole, mesh, "tp"), strategy.spec.model)
        if mesh.spec.ep > 1 and norm.is_expert(name):
            whole = torch.cat(_parts(whole, mesh, "ep"))
    if whole is not None and mesh.spec.pp == 1:
        return whole
    return _from_stage(strategy, name, whole)


def _parts(part: Tensor, mesh: Mesh, axis: Axis) -> list[Tensor]:
    """The parts of all ranks along an axis, in order."""
    import torch.distributed as dist

    group = mesh.group(axis)
    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, part.contiguous(), group=group)
    return parts


def _from_stage(strategy: Strategy, name: str, whole: Tensor | None) -> Tensor:
    """A parameter that lies on one rank of the pipeline, on all of them."""
    import torch.distributed as dist

    group, device = strategy.mesh.group("pp"), strategy.device
    owner = torch.tensor(-1 if whole is None else strategy.mesh.place["pp"], device=device)
    dist.all_reduce(owner, op=dist.ReduceOp.MAX, group=group)
    if whole is None:
        dtype = COMPUTE_DTYPES[strategy.spec.precision.weights]
        whole = torch.empty(strategy.shapes[name], dtype=dtype, device=device)
    found = whole.contiguous()
    dist.broadcast(found, group=group, group_src=int(owner))
    return found
