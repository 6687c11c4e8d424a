"""What a pipeline's ranks send each other in a pass of all microbatches, and how often FSDP gathers a stage meanwhile.

Each boundary between stages on two ranks carries b s h values forward and as many back for every microbatch (Narayanan
et al. 2021); the two stages of a V's turning rank hand theirs over in memory. Counts follow the actions in
harness.ledger.schedules.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.ledger.schedules import Pipeline, order
from harness.spec.parallelism import ParallelismSpec

MOST_STAGES_KEPT = 3
"""torch's schedules keep as many FSDP stages of a rank gathered at once."""


@dataclass(frozen=True)
class Transfers:
    """Tensors of one microbatch's stream that a rank passes on in one pass."""

    sends: int
    receives: int


def transfers(pipeline: Pipeline, rank: int) -> Transfers:
    """What one rank sends and receives."""
    sends = receives = 0
    for kind, stage, _ in order(pipeline, rank):
        if kind == "W":
            continue
        before, after = (stage - 1, stage + 1) if kind == "F" else (stage + 1, stage - 1)
        receives += _elsewhere(pipeline, before, rank)
        sends += _elsewhere(pipeline, after, rank)
    return Transfers(sends, receives)


def _elsewhere(pipeline: Pipeline, stage: int, rank: int) -> bool:
    return 0 <= stage < pipeline.num_stages and pipeline.rank_of(stage) != rank


def weight_gathers(mesh: ParallelismSpec) -> int:
    """How often FSDP gathers a block of a stage in one pass (zero 2 or 3): once, or m + 1 times where it is freed after
    a forward pass, since a forward pass that follows a backward one finds it gathered. What lies outside the blocks is
    gathered once. Every group is reduce-scattered once a pass.

    Zero 3 goes with whole backward passes alone (mesh_problems): where W comes later, a forward pass in between has
    freed the weights that W belongs to. Raises ValueError for more stages a rank than torch keeps gathered: it frees
    and gathers them again in between.
    """
    if mesh.local_stages > MOST_STAGES_KEPT:
        raise ValueError(
            f"with FSDP at most {MOST_STAGES_KEPT} stages a rank are gathered at once, got {mesh.local_stages}"
        )
    return mesh.num_microbatches + 1 if mesh.zero == 3 else 1
