"""Journals become rows exactly once, however often and wherever ingestion is broken off."""

from __future__ import annotations

import importlib.resources
import json
import math
import struct
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import duckdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from results.ingest import BadRunFolder, ingest_run
from results.journal import JournalWriter
from results.store import Store

Make = Callable[..., Any]


def all_rows(store: Store, table: str) -> list[tuple[Any, ...]]:
    return store.query(f"SELECT * FROM {table} ORDER BY ALL")[1]


def test_a_finished_run(run_folder: Make, store: Store) -> None:
    run = run_folder()
    run.writer.start(
        {"hostname": "h", "machine": "M 2 cores", "packages": {"torch": "2"}, "details": {"load": 1}}
    )
    run.writer.measure(0, {"num_parameters": 1234, "val_loss": 5.5})
    run.writer.note("mfu", None, "peak is not known")
    run.writer.measure(1, {"loss": 2.5, "mfu": None})
    run.writer.checkpoint(1, "aa")
    run.writer.measure(2, {"quant_amax": 3.0}, "layers.0.ffn.down.weights")
    run.writer.checkpoint(2, "bb", final=True)
    run.writer.end("ok")
    assert store.ingest(run.path)
    (row,) = store.runs()
    assert (row.run_id, row.key, row.attempt, row.case_name, row.role) == ("k1.1", "k1", 1, "a_case", "arm")
    assert (row.status, row.reason, row.fidelity, row.device) == ("ok", "", "native", "cpu")
    assert row.labels == {"precision": "bf16", "seed": 0} and row.spec == run.request["spec"]
    assert row.num_parameters == 1234
    assert (row.resume_checkpoint, row.resume_step, row.final_checkpoint) == ("aa", 1, "bb")
    assert row.notes["mfu"] == {"value": None, "reason": "peak is not known"}
    assert row.notes["jobs"] == {"value": 2, "reason": "2 cores"}
    assert row.started_at is not None and row.ended_at is not None and row.started_at <= row.ended_at
    assert abs((datetime.now(UTC).replace(tzinfo=None) - row.ended_at).total_seconds()) < 60
    assert row.journal_bytes == {"0": run.journal.stat().st_size}
    environment = store.environment(row.environment_id)
    assert environment is not None
    assert (environment["machine"], environment["details"]) == ("M 2 cores", {"load": 1})
    assert all_rows(store, "measurements") == [
        ("k1.1", 0, 0, "num_parameters", "", 1234.0),
        ("k1.1", 0, 0, "val_loss", "", 5.5),
        ("k1.1", 0, 1, "loss", "", 2.5),
        ("k1.1", 0, 1, "mfu", "", None),
        ("k1.1", 0, 2, "quant_amax", "layers.0.ffn.down.weights", 3.0),
    ]
    assert not store.ingest(run.path)
    assert len(all_rows(store, "measurements")) == 5


def test_fidelity_comes_from_the_recipe(run_folder: Make, store: Store) -> None:
    store.ingest(run_folder(spec={"precision": {"recipe": {"weights": {}}}}).train(range(1, 2)).path)
    assert store.runs()[0].fidelity == "emulated"


def test_cut_at_every_byte_then_completed(tmp_path: Path, run_folder: Make) -> None:
    example = run_folder("example")
    example.writer.start({})
    example.writer.measure(1, {"loss": 2.5, "mfu": None})
    example.writer.note("mfu", None, "unknown")
    example.writer.checkpoint(1, "cc", final=True)
    example.writer.measure(2, {"quant_amax": 0.1}, "layers.0")
    example.writer.end("ok")
    data = example.journal.read_bytes()
    expected = [(1, "loss", "", 2.5), (1, "mfu", "", None), (2, "quant_amax", "layers.0", 0.1)]

    connection = duckdb.connect()
    connection.execute(importlib.resources.files("results").joinpath("schema.sql").read_text())
    run = run_folder("cut")
    for size in range(len(data) + 1):
        connection.execute("DELETE FROM runs; DELETE FROM measurements")
        run.journal.write_bytes(data[:size])
        assert ingest_run(connection, run.path)
        (status,) = connection.execute("SELECT status FROM runs").fetchall()
        assert status == ("ok",) if size == len(data) else ("interrupted",)
        run.journal.write_bytes(data)
        assert ingest_run(connection, run.path) == (size < len(data))
        rows = connection.execute(
            "SELECT step, metric, scope, value FROM measurements ORDER BY ALL"
        ).fetchall()
        assert rows == expected, size
        found = connection.execute("SELECT status, final_checkpoint, journal_bytes FROM runs").fetchall()
        assert found == [("ok", "cc", json.dumps({"0": len(data)}))]


def test_damage_is_said(run_folder: Make, store: Store) -> None:
    run = run_folder().train(range(1, 4))
    data = bytearray(run.journal.read_bytes())
    data[-20] ^= 4
    run.journal.write_bytes(data)
    store.ingest(run.path)
    (row,) = store.runs()
    assert row.status == "interrupted"
    assert "rank 0's is cut or damaged after byte" in row.reason
    assert [step for step, _ in store.curve("k1", "loss")] == [1, 2, 3]


def test_status_of_a_run_without_an_end(run_folder: Make, store: Store) -> None:
    run = run_folder().train(range(1, 3), status=None)
    store.ingest(run.path)
    assert store.runs()[0].status == "interrupted"
    assert store.ingest(run.path, status="hung", reason="no sign of life for 120 s")
    assert (store.runs()[0].status, store.runs()[0].reason) == ("hung", "no sign of life for 120 s")
    assert not store.ingest(run.path), "what the parent saw is not overwritten by a later look"
    assert store.runs()[0].status == "hung"
    run.writer.measure(3, {"loss": 1.0})
    assert store.ingest(run.path)
    assert store.runs()[0].status == "hung"
    run.writer.end("ok")
    assert store.ingest(run.path, status="crashed", reason="exit status 1")
    assert store.runs()[0].status == "ok", "the worker's own word counts most"
    assert [step for step, _ in store.curve("k1", "loss")] == [1, 2, 3]


def test_a_run_that_died_before_its_journal(run_folder: Make, store: Store) -> None:
    run = run_folder()
    run.journal.unlink()
    assert store.ingest(run.path, status="crashed", reason="exit status 1: ImportError")
    assert not store.ingest(run.path)
    assert [(row.status, row.started_at) for row in store.runs()] == [("crashed", None)]


def test_ranks(run_folder: Make, store: Store) -> None:
    run = run_folder()
    second = JournalWriter(run.path / "rank1.journal")
    for rank, writer in enumerate((run.writer, second)):
        writer.start({"hostname": "h"}, rank)
        writer.measure(1, {"loss": 1.0 + rank})
    run.writer.end("ok")
    store.ingest(run.path)
    assert store.runs()[0].status == "interrupted", "rank 1 has not ended"
    second.end("oom", "rank 1 ran out of memory")
    store.ingest(run.path)
    assert (store.runs()[0].status, store.runs()[0].reason) == ("oom", "rank 1 ran out of memory")
    assert store.curve("k1", "loss") == [(1, 1.0)]
    assert store.curve("k1", "loss", rank=1) == [(1, 2.0)]


def test_a_rank_whose_journal_is_gone(run_folder: Make, store: Store) -> None:
    run = run_folder(num_ranks=2)
    run.writer.start({"hostname": "h"}, 0)
    run.writer.end("ok")
    store.ingest(run.path)
    row = store.runs()[0]
    assert (row.status, row.reason) == ("interrupted", "1 of 2 ranks' journals are missing")


def test_a_shortened_journal_takes_nothing_away(run_folder: Make, store: Store) -> None:
    run = run_folder().train(range(1, 4))
    store.ingest(run.path)
    run.journal.write_bytes(run.journal.read_bytes()[:300])
    assert not store.ingest(run.path)
    run.journal.unlink()
    assert not store.ingest(run.path, status="crashed")
    assert store.runs()[0].status == "ok"
    assert len(store.curve("k1", "loss")) == 3


def test_another_machines_run_of_the_same_number_is_kept_apart(
    run_folder: Make, store: Store, tmp_path: Path
) -> None:
    ours = run_folder().train(range(1, 4))
    theirs = run_folder(where=tmp_path / "theirs").train(range(1, 4), offset=1.0)
    for _ in range(2):
        store.ingest(ours.path)
        store.ingest(theirs.path)
    assert store.query("SELECT run_id, count(*) FROM measurements GROUP BY ALL ORDER BY ALL")[1] == [
        ("k1.1", 6),
        ("k1.2", 6),
    ]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "no run.json"),
        ('{"key": "k1"', "damaged"),
        ("{}", "damaged"),
        ('{"key": "k1", "attempt": 1, "spec": []}', "spec must be a mapping"),
        ('{"key": 3, "attempt": 1}', "text"),
    ],
)
def test_bad_folders(content: str | None, says: str, tmp_path: Path, store: Store) -> None:
    folder = tmp_path / "journals" / "k1" / "1"
    folder.mkdir(parents=True)
    if content is not None:
        (folder / "run.json").write_text(content)
    with pytest.raises(BadRunFolder, match=says) as caught:
        store.ingest(folder)
    assert str(folder) in str(caught.value)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, Path]:
    folder = tmp_path_factory.mktemp("floats")
    return Store(folder / "suite.duckdb"), folder


@settings(max_examples=30, deadline=None)
@given(values=st.lists(st.floats(), min_size=1, max_size=20))
def test_floats_are_exact_from_journal_to_curve(values: list[float], shared: tuple[Store, Path]) -> None:
    store, folder = shared
    key = f"k{sum(1 for _ in folder.iterdir())}"
    (folder / key).mkdir()
    request = {"key": key, "attempt": 1, "spec": {}}
    (folder / key / "run.json").write_text(json.dumps(request))
    writer = JournalWriter(folder / key / "rank0.journal")
    for step, value in enumerate(values):
        writer.measure(step, {"loss": value})
    writer.close()
    with store:
        store.ingest(folder / key)
        curve = store.curve(key, "loss")
    assert [step for step, _ in curve] == list(range(len(values)))
    for value, (_, found) in zip(values, curve, strict=True):
        assert struct.pack("d", value) == struct.pack("d", found) or (math.isnan(value) and math.isnan(found))


def test_many_values(run_folder: Make, store: Store) -> None:
    run = run_folder()
    names = [f"metric_{i}" for i in range(20)]
    for step in range(1, 1001):
        run.writer.measure(step, {name: step / 7 + i for i, name in enumerate(names)})
    store.ingest(run.path)
    assert store.query("SELECT count(*), sum(step) FROM measurements")[1] == [(20_000, 20 * 500_500)]
    assert store.curve("k1", "metric_19")[-1] == (1000, 1000 / 7 + 19)
