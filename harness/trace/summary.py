"""From an account of storages to the one shape of a step's cost, and what is recorded beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.data.vocabulary import vocab_size
from harness.ledger.parameters import num_parameters
from harness.ledger.step import STATES, Collective, RankStep, Recorder
from harness.spec import RunSpec
from harness.trace.lives import Account


def rank_step(rank: int, held: Account, flops: int, collectives: tuple[Collective, ...] = ()) -> RankStep:
    return RankStep(
        rank=rank,
        peak=held.peak,
        moment=held.moment,
        state=held.state,
        saved=held.saved,
        collectives=collectives,
        flops=flops,
        layers=held.layers,
    )


def describe(held: Account) -> list[dict[str, Any]]:
    """The largest tensors at the peak."""
    return [
        {"bytes": life.num_bytes, "category": category, "block": life.module, "shape": list(life.shape)}
        for category, life in held.largest
    ]


def record_per_parameter(journal: Recorder, spec: RunSpec, ranks: Sequence[RankStep], step: int) -> None:
    """bytes_per_parameter: the largest rank's states over the parameters of the whole model."""
    count = num_parameters(spec.model, vocab_size(spec.data.tokenizer)).total
    for name in STATES:
        largest = max(each.state[name] for each in ranks)
        journal.measure(step, {"bytes_per_parameter": largest / count}, scope=name)
    total = max(sum(each.state.values()) for each in ranks)
    journal.measure(step, {"bytes_per_parameter": total / count}, scope="total")
