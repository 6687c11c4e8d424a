"""One training step by formula."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness.data.vocabulary import vocab_size
from harness.ledger.parameters import num_parameters
from harness.ledger.placement import kinds_of_rank
from harness.ledger.predict import predict_step
from harness.ledger.step import STATES, record
from harness.spec import RunSpec
from results.journal import JournalWriter

EVERY_RANK_UP_TO = 16
"""Ranks of a mesh that are all predicted; of a larger one those that differ in kind."""


def ledger(spec: RunSpec, request: dict[str, Any], journal: JournalWriter, checkpoints: Path) -> list[Path]:
    """Predict a step of `spec`; leaves no files."""
    vocab, size = vocab_size(spec.data.tokenizer), spec.parallelism.num_ranks
    ranks = [
        predict_step(spec, vocab, r)
        for r in (range(size) if size <= EVERY_RANK_UP_TO else kinds_of_rank(spec.parallelism))
    ]
    count = num_parameters(spec.model, vocab).total
    journal.measure(1, {"num_parameters": count})
    journal.note(
        "predicted_ranks",
        [each.rank for each in ranks],
        "all of them" if len(ranks) == size else f"of {size}: one of each kind",
    )
    record(journal, ranks)
    for name in STATES:
        journal.measure(
            1, {"bytes_per_parameter": max(each.state[name] for each in ranks) / count}, scope=name
        )
    whole = max(sum(each.state.values()) for each in ranks)
    journal.measure(1, {"bytes_per_parameter": whole / count}, scope="total")
    return []
