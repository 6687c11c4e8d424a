"""What recording costs: a journal record of 20 scalars beside the plainest way to write one.

    pytest tests/benchmarks/test_recording.py --benchmark-columns=min,median

Compare medians within one run; both ways write each record through to the file.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from results.journal import JournalWriter
from results.store import Store

RANDOM = random.Random(0)
VALUES = {f"metric_name_{i}": RANDOM.lognormvariate(0, 3) for i in range(20)}


def test_journal(benchmark: Any, tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path / "journal")
    benchmark(writer.measure, 7, VALUES)


def test_plain_json(benchmark: Any, tmp_path: Path) -> None:
    with (tmp_path / "plain.jsonl").open("ab", buffering=0) as file:
        benchmark(lambda: file.write((json.dumps({"k": "m", "s": 7, "v": VALUES}) + "\n").encode()))


def test_ingest_200k_values(benchmark: Any, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"key": "k", "attempt": 1, "spec": {}}))
    writer = JournalWriter(tmp_path / "rank0.journal")
    for step in range(10_000):
        writer.measure(step, VALUES)
    names = iter(range(100))
    benchmark.pedantic(lambda: Store(tmp_path / f"{next(names)}.duckdb").ingest(tmp_path), rounds=3)
