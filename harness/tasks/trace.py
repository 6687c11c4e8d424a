"""One training step on tensors without data: its memory and its collectives, for any number of ranks."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from harness.data.vocabulary import vocab_size
from harness.ledger.step import record
from harness.spec import RunSpec
from harness.trace.summary import record_per_parameter
from results.journal import JournalWriter


def trace(spec: RunSpec, request: dict[str, Any], journal: JournalWriter, checkpoints: Path) -> list[Path]:
    """Trace a step of `spec`, one rank of each kind; leaves no files."""
    from harness.trace.ranks import trace_ranks

    started = time.perf_counter()
    ranks = trace_ranks(spec, vocab_size(spec.data.tokenizer), journal.beat)
    journal.note(
        "traced_ranks",
        [each.rank for each in ranks],
        f"of {spec.parallelism.num_ranks}: one of each kind, of a long pipeline its ends and the largest by formula",
    )
    journal.note("trace_seconds", round(time.perf_counter() - started, 3), "wall time of the trace")
    record(journal, ranks)
    record_per_parameter(journal, spec, ranks, 1)
    return []
