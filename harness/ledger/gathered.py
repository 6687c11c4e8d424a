"""FSDP2's passing memory: gathered parameters, the buffers they are gathered into, and those that gradients are
reduced from.

Parameters are gathered group by group: each block, its experts where ep shares them out, and the rest of a stage,
its root. A group's all-gather writes one flat buffer, which is copied into the parameters and then freed. In the
forward pass it is freed when the next group's has been copied; in the backward pass the group before is prefetched,
so its buffer lies there during a layer's backward. Gradients of a group wait, unsharded, for its last one; then they
are copied into one flat input of the reduce-scatter, which stays until the next group reduces.
(torch.distributed.fsdp._fully_shard: _fsdp_param_group.py, _fsdp_collectives.py.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from harness.ledger.inventory import Parameter
from harness.ledger.placement import local_parameters
from harness.ledger.states import shards
from harness.ledger.step import Category
from harness.ledger.tape import Bytes
from harness.ledger.terms import BYTES
from harness.spec import RunSpec


@dataclass(frozen=True)
class Group:
    """Bytes of one group."""

    gathered: int
    """Its parameters, whole, in the dtype that they are gathered in."""
    reduce_input: int
    """Its gradients, whole, in the dtype that they are reduced in."""
    reduce_output: int
    """This rank's part of them."""
    largest: int
    """Of `gathered`, what is gathered at once: experts that ep shares out are a group of their own."""
    last_input: int
    """Of `reduce_input`, what is reduced last: all but those experts."""


NO_GROUP = Group(0, 0, 0, 0, 0)


@dataclass(frozen=True)
class Gathered:
    """The groups of a rank. ZeRO-3 gathers blocks twice, ZeRO-2 keeps them from the forward pass on."""

    root: Group
    blocks: dict[int, Group]
    """Layer -> its group, experts of their own among it."""
    twice: bool
    added: bool
    """Whether reduced gradients are added to those of a micro-step before, and gone then."""
    averaged: bool
    """Whether they go through an all-reduce over replicas first (HSDP), whose buffer stays to the end of the backward
    pass."""

    def before(self, layer: int) -> Group:
        """The group that is prefetched while `layer` runs backward."""
        return self.blocks.get(layer - 1, NO_GROUP) if self.twice else NO_GROUP

    @property
    def reduced(self) -> Category:
        """What a group's reduced gradients count as when they come."""
        return "gradients" if not self.added else "communication" if self.averaged else "temporary"

    def left(self, group: Group) -> Bytes:
        """What stays of a group's reduced gradients."""
        return {self.reduced: 0 if self.reduced == "temporary" else group.reduce_output}

    @property
    def at_loss(self) -> int:
        """Gathered parameters at the end of the forward pass."""
        return self.root.gathered + (
            0 if self.twice else sum(group.gathered for group in self.blocks.values())
        )


def gathered(spec: RunSpec, vocab_size: int | None = None, rank: int = 0) -> Gathered | None:
    """The groups of a rank; None where parameters lie whole."""
    mesh = spec.parallelism
    cut = shards(spec, rank)
    if mesh.zero < 2 or cut.dense == 1:
        return None
    narrow = spec.precision.recipe is None
    passed = BYTES[spec.precision.compute if narrow else spec.precision.weights]
    parts: dict[int | None, list[Parameter]] = {}
    for parameter in local_parameters(spec, vocab_size, rank):
        parts.setdefault(parameter.layer, []).append(parameter)
    known: dict[tuple[tuple[int, ...], ...], Group] = {}
    reduced = BYTES[spec.precision.weights]

    def group(parameters: list[Parameter]) -> Group:
        shapes = tuple((cut.of(p)[0], p.kind == "expert" and mesh.ep > 1, *p.shape) for p in parameters)
        if shapes not in known:
            sizes = [(n, apart, -(-rows // n) * math.prod(rest)) for n, apart, rows, *rest in shapes if n > 1]
            shard = sum(size for *_, size in sizes)
            experts = sum(n * size for n, apart, size in sizes if apart)
            dense = sum(n * size for n, apart, size in sizes if not apart)
            known[shapes] = Group(
                gathered=(experts + dense) * passed,
                reduce_input=(experts + dense) * reduced,
                reduce_output=shard * reduced,
                largest=max(experts, dense) * passed,
                last_input=dense * reduced,
            )
        return known[shapes]

    root = group(parts.pop(None, []))
    blocks = {layer: group(of_layer) for layer, of_layer in parts.items() if layer is not None}
    return Gathered(
        root,
        blocks,
        twice=mesh.zero == 3 and mesh.pp == 1,
        added=spec.accumulation > 1,
        averaged=mesh.replicas > 1,
    )
