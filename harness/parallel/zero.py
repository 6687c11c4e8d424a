"""ZeRO (Rajbhandari et al. 2020): stage 1 by ZeroRedundancyOptimizer, 2 and 3 by FSDP2, HSDP by its two-dimensional
mesh.

Per rank and step, n micro-steps, P the bytes of the parameters in a dtype (c: as gathered, g: as reduced):

    zero 1    DDP's all_reduces (harness.parallel.replicate), then after the update one broadcast a rank: together
              the bytes of all parameters, since every rank sends on what it updated (harness.optim.build)
    zero 2    n times: all_gather of every group (P_c), reduce_scatter of every group (P_g)
    zero 3    n times: all_gather of every group in the forward pass and of every block once more in the backward pass
              (2 P_c less the root's), reduce_scatter of every group (P_g)
    HSDP      the same over the shards, and after each reduce_scatter an all_reduce of the shard over the replicas

A group is a block, or the root: embedding, positions, last norm and head. Gradients are reduced in every micro-step:
keeping them whole until the last one would give up what the stage saves. A parameter is cut along its first dimension,
in parts of ceil(rows / n); the last ranks' parts are padded in transit, so payloads count ceil(rows / n) n rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from harness.models.transformer import Block, Transformer
from harness.run import COMPUTE_DTYPES
from harness.spec import PrecisionSpec

if TYPE_CHECKING:
    from harness.parallel.mesh import Mesh


def keeps_policy(precision: PrecisionSpec) -> bool:
    """Whether FSDP2's own mixed precision takes autocast's place: weights gathered in the compute dtype, gradients
    reduced in the weights'. Recipes cast what they multiply themselves, from the stored weights."""
    return precision.recipe is None and precision.compute != precision.weights


def shard(part: Transformer, mesh: Mesh, precision: PrecisionSpec, reshard: bool) -> None:
    """FSDP2 on `part`, in place: each block a group, the rest one. `reshard`: weights are gathered again in the
    backward pass (zero 3)."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    options: dict[str, Any] = {}
    if keeps_policy(precision):
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=COMPUTE_DTYPES[precision.compute], reduce_dtype=COMPUTE_DTYPES[precision.weights]
        )
    if mesh.size("dp", "ep", "cp") == 1:
        return
    dense = mesh.shards("dp", "ep", "cp")
    kept = _shard_experts(part, mesh, options, reshard)
    for block in part.modules():
        if isinstance(block, Block):
            fully_shard(block, mesh=dense, reshard_after_forward=reshard, ignored_params=kept, **options)
    fully_shard(part, mesh=dense, reshard_after_forward=False, ignored_params=kept, **options)


def _shard_experts(
    part: Transformer, mesh: Mesh, options: dict[str, Any], reshard: bool
) -> set[nn.Parameter]:
    """Experts that ep has shared out lie on dp · cp ranks: groups of their own. Returns those that lie on one rank
    alone, which FSDP2 must leave as they are."""
    from torch.distributed.fsdp import fully_shard

    if mesh.spec.ep == 1:
        return set()
    experts = [mixture.experts for mixture in part.mixtures()]
    if mesh.size("dp", "cp") == 1:
        return {parameter for each in experts for parameter in each.parameters()}
    for each in experts:
        fully_shard(each, mesh=mesh.shards("dp", "cp"), reshard_after_forward=reshard, **options)
    return set()


def reshard(part: nn.Module) -> None:
    """Free the weights that a forward pass without a backward pass has left gathered."""
    for module in part.modules():
        free = getattr(module, "reshard", None)
        if free is not None:
            free()


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor, sharing its memory; any other tensor as it is."""
    part: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return part
