"""A step of any mesh, up to thousands of ranks: those ranks are traced that differ from each other."""

from __future__ import annotations

from collections.abc import Callable

from harness.ledger.predict import predict_step
from harness.ledger.step import RankStep
from harness.spec import RunSpec
from harness.trace.rank import trace_rank

ALL_STAGES = 4
"""Up to so many pipeline ranks each is traced; of a longer pipeline the first, the last and the formula's largest."""


def distinct(spec: RunSpec, vocab_size: int) -> list[int]:
    """The first rank of each pipeline stage that is worth the time. Ranks along the other axes do the same with other
    tokens or other rows of the same matrices."""
    mesh = spec.parallelism
    stages = [mesh.rank({"pp": stage}) for stage in range(mesh.pp)]
    if mesh.pp <= ALL_STAGES:
        return stages
    largest = max(stages, key=lambda rank: predict_step(spec, vocab_size, rank).total)
    return sorted({stages[0], largest, stages[-1]})


def trace_ranks(spec: RunSpec, vocab_size: int, beat: Callable[[], object] = lambda: None) -> list[RankStep]:
    """The step of those ranks; `beat` is called between them."""
    found = []
    for rank in distinct(spec, vocab_size):
        found.append(trace_rank(spec, vocab_size, rank))
        beat()
    return found
