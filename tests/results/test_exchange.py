"""Out and in again: nothing lost, nothing twice, both machines kept."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from results.database import StoreError
from results.records import TABLES
from results.store import Store

Make = Callable[..., Any]


def contents(store: Store) -> str:
    """All tables as text, in which NaN equals NaN."""
    return "\n".join(str(store.query(f"SELECT * FROM {table} ORDER BY ALL")[1]) for table in TABLES)


@pytest.fixture
def full(run_folder: Make, store: Store) -> Store:
    run = run_folder("k1").train(range(1, 4), status=None)
    run.writer.measure(
        4, {"loss": math.nan, "gradient_norm": -math.inf, "mfu": None, "learning_rate": 0.1 + 0.2}
    )
    run.writer.note("mfu", None, 'unknown, a "quoted" reason,\nwith a line')
    run.writer.end("diverged", "loss is nan")
    store.ingest(run.path)
    store.ingest(run_folder("k2").train(range(1, 4)).path)
    store.skip(run_folder("k3").request, "its base diverged")
    store.save_verdicts(
        [{"case_name": "a_case", "size": "laptop", "claim_id": "c", "machine": "M", "effect": math.nan}]
    )
    return store


def test_parquet_loses_nothing(full: Store, tmp_path: Path) -> None:
    files = full.export(tmp_path / "parquet", "parquet")
    assert [path.name for path in files] == [f"{table}.parquet" for table in TABLES]
    copy = Store(tmp_path / "copy.duckdb")
    result = copy.merge(tmp_path / "parquet")
    assert (result.num_new, result.num_updated, result.num_known, result.renamed) == (3, 0, 0, {})
    assert contents(copy) == contents(full)
    result = copy.merge(tmp_path / "parquet")
    assert (result.num_new, result.num_updated, result.num_known) == (0, 0, 3)
    assert contents(copy) == contents(full)


def test_merging_a_database_keeps_both_machines_runs(run_folder: Make, store: Store, tmp_path: Path) -> None:
    store.ingest(run_folder("k1").train(range(1, 4)).path)
    there = Store(tmp_path / "there" / "suite.duckdb")
    for attempt, status in ((1, "interrupted"), (2, "ok")):
        there.ingest(
            run_folder("k1", attempt, where=tmp_path / "theirs")
            .train(range(1, 4), status=status, offset=5.0)
            .path
        )
    there.ingest(run_folder("k2", where=tmp_path / "theirs").train(range(1, 4)).path)
    result = store.merge(there.path)
    assert result.renamed == {"k1.1": "k1.2", "k1.2": "k1.3"}
    assert (result.num_new, result.num_known) == (3, 0)
    counts = "SELECT run_id, count(*) FROM runs JOIN measurements USING (run_id) GROUP BY ALL ORDER BY ALL"
    expected = [("k1.1", 6), ("k1.2", 6), ("k1.3", 6), ("k2.1", 6)]
    assert store.query(counts)[1] == expected
    before = contents(store)
    result = store.merge(there.path)
    assert (result.num_new, result.num_updated, result.num_known) == (0, 0, 3)
    assert contents(store) == before
    assert store.ingest_tree(tmp_path / "journals") == 0 and store.ingest_tree(tmp_path / "theirs") == 0
    there.merge(store.path)
    assert set(there.query(counts)[1]) == set(expected), "and back: the same four runs"


def test_whoever_read_more_of_a_run_is_right(run_folder: Make, store: Store, tmp_path: Path) -> None:
    run = run_folder("k1").train(range(1, 4), status=None)
    there = Store(tmp_path / "there.duckdb")
    there.ingest(run.path)
    run.writer.measure(4, {"loss": 0.25})
    run.writer.end("ok")
    store.ingest(run.path)
    before = contents(store)
    assert store.merge(there.path).num_known == 1
    assert contents(store) == before
    assert there.merge(store.path).num_updated == 1
    assert contents(there) == before


def test_an_outcome_beats_an_absence(run_folder: Make, store: Store, tmp_path: Path) -> None:
    run = run_folder("k1").train(range(1, 4), status=None)
    there = Store(tmp_path / "there.duckdb")
    there.ingest(run.path, status="hung", reason="no sign of life")
    store.ingest(run.path)
    assert store.merge(there.path).num_updated == 1
    assert there.merge(store.path).num_known == 1
    assert store.runs()[0].status == there.runs()[0].status == "hung"
    assert len(store.curve("k1", "loss")) == 3


def test_the_later_verdict_stays(store: Store, tmp_path: Path) -> None:
    there = Store(tmp_path / "there.duckdb")
    verdict = {"case_name": "c", "size": "laptop", "claim_id": "a", "machine": "M"}
    store.save_verdicts([verdict | {"verdict": "differs", "decided_at": "2026-01-01T00:00:00"}])
    there.save_verdicts([verdict | {"verdict": "reproduced", "decided_at": "2026-02-01T00:00:00"}])
    store.merge(there.path)
    there.merge(store.path)
    assert [row["verdict"] for row in store.verdicts() + there.verdicts()] == ["reproduced", "reproduced"]


def test_csv_and_json_lines(full: Store, tmp_path: Path) -> None:
    full.export(tmp_path / "out", "csv")
    full.export(tmp_path / "out", "jsonl")
    with (tmp_path / "out" / "measurements.csv").open(newline="") as file:
        from_csv = {(row["run_id"], row["step"], row["metric"]): row["value"] for row in csv.DictReader(file)}
    lines = [json.loads(line) for line in (tmp_path / "out" / "measurements.jsonl").read_text().splitlines()]
    assert len(from_csv) == len(lines) == 16
    assert float(from_csv["k1.1", "4", "learning_rate"]) == 0.1 + 0.2
    assert from_csv["k1.1", "4", "loss"] == "nan" and from_csv["k1.1", "4", "mfu"] == ""
    values = {(row["run_id"], row["step"], row["metric"]): row["value"] for row in lines}
    assert values["k1.1", 4, "learning_rate"] == 0.1 + 0.2 and values["k1.1", 4, "gradient_norm"] == -math.inf
    runs = [json.loads(line) for line in (tmp_path / "out" / "runs.jsonl").read_text().splitlines()]
    assert runs[0]["labels"] == {"precision": "bf16", "seed": 0}


def test_mistakes_are_explained(full: Store, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="parquet, csv, jsonl"):
        full.export(tmp_path / "out", "xlsx")
    (tmp_path / "empty").mkdir()
    with pytest.raises(StoreError, match="suite export --format parquet"):
        full.merge(tmp_path / "empty")
    full.export(tmp_path / "out", "parquet")
    (tmp_path / "out" / "measurements.parquet").write_bytes(b"PAR1")
    copy = Store(tmp_path / "copy.duckdb")
    assert copy.runs() == []
    before = contents(copy)
    with pytest.raises(StoreError, match="cannot merge"):
        copy.merge(tmp_path / "out")
    assert contents(copy) == before, "no runs without their measurements"
