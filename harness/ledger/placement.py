"""Which parameters lie on which rank: the cuts of the pipeline, of tensor and of expert parallelism.

What data parallelism then shards of them is harness.ledger.states.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from harness.ledger.inventory import Parameter, inventory
from harness.spec import ModelSpec, ParallelismSpec, RunSpec


@dataclass(frozen=True)
class Stage:
    """Blocks `first` to `last` - 1 of a pipeline stage, and whether embedding and head lie with them."""

    first: int
    last: int
    has_embedding: bool
    has_head: bool

    @property
    def num_layers(self) -> int:
        return self.last - self.first


def layers_of_stage(num_layers: int, num_stages: int, stage: int) -> range:
    """Consecutive blocks, as many on each stage as on any other, one more on the first ones where it does not
    divide."""
    each, more = divmod(num_layers, num_stages)
    first = stage * each + min(stage, more)
    return range(first, first + each + (stage < more))


def stages(spec: RunSpec, pp_rank: int) -> tuple[Stage, ...]:
    """The stages of a pipeline rank; the whole model where there is no pipeline."""
    return _stages(spec.model, spec.parallelism, pp_rank)


def _stages(model: ModelSpec, mesh: ParallelismSpec, pp_rank: int) -> tuple[Stage, ...]:
    found = []
    for number in mesh.stages_of(pp_rank):
        blocks = layers_of_stage(model.num_layers, mesh.num_stages, number)
        found.append(Stage(blocks.start, blocks.stop, number == 0, number == mesh.num_stages - 1))
    return tuple(found)


def kinds_of_rank(mesh: ParallelismSpec) -> list[int]:
    """The first rank of each pipeline stage. Ranks along the other axes hold as much of the same, but for ZeRO-1's
    share (which differs by less than the largest parameter) and the last rows of uneven shards (which lie in padded
    storage)."""
    return [mesh.rank({"pp": stage}) for stage in range(mesh.pp)]


def local_parameters(spec: RunSpec, vocab_size: int | None, rank: int = 0) -> tuple[Parameter, ...]:
    """Parameters of a rank with the shapes that tp and ep leave of them, before data parallelism shards them."""
    mesh = spec.parallelism
    return _local(spec.model, mesh, vocab_size, mesh.place(rank)["pp"])


@lru_cache(maxsize=256)
def _local(
    model: ModelSpec, mesh: ParallelismSpec, vocab_size: int | None, pp_rank: int
) -> tuple[Parameter, ...]:
    held = _stages(model, mesh, pp_rank)
    return tuple(
        _cut(each, mesh.tp, mesh.ep)
        for each in inventory(model, vocab_size)
        if any(_on_stage(each, stage) for stage in held)
    )


def _on_stage(parameter: Parameter, stage: Stage) -> bool:
    if parameter.layer is not None:
        return stage.first <= parameter.layer < stage.last
    return stage.has_embedding if parameter.kind in ("embedding", "positions") else stage.has_head


def _cut(parameter: Parameter, tp: int, ep: int) -> Parameter:
    if parameter.kind == "expert":
        return parameter.divided(0, ep)
    if parameter.cut is not None and tp > 1:
        return parameter.divided(parameter.cut, tp)
    return parameter
