"""Reading back: attempts, curves, checkpoints, verdicts, queries, and trees of run folders."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from results.database import NoDatabase, QueryError, StoreError
from results.ingest import BadRunFolder
from results.records import METRICS, STATUSES, metric
from results.store import Store

Make = Callable[..., Any]


def test_resumed_attempts_read_as_one_curve(run_folder: Make, store: Store) -> None:
    first = run_folder("k1", 1).train(range(1, 7), status=None)
    first.writer.checkpoint(4, "aa")
    store.ingest(first.path)
    assert store.resume_checkpoint("k1") == ("aa", 4)
    second = run_folder("k1", 2).train(range(5, 11), offset=10.0)
    second.writer.close()
    store.ingest(second.path)
    assert store.curve("k1", "loss") == [(s, 1 / s) for s in range(1, 5)] + [
        (s, 1 / s + 10) for s in range(5, 11)
    ]
    assert [row.run_id for row in store.runs()] == ["k1.2"]
    assert store.resume_checkpoint("k1") is None, "it is done"


def test_an_interrupted_attempt_after_an_ok_one_counts_for_nothing(run_folder: Make, store: Store) -> None:
    store.ingest(run_folder("k1", 1).train(range(1, 4)).path)
    store.ingest(run_folder("k1", 2).train(range(1, 3), status=None, offset=9.0).path)
    assert store.status_of(["k1", "k2"])["k1"].attempt == 1
    assert list(store.status_of(["k1", "k2"])) == ["k1"]
    assert store.curve("k1", "loss") == [(1, 1.0), (2, 0.5), (3, 1 / 3)]


def test_the_newest_attempt_counts_where_none_is_ok(run_folder: Make, store: Store) -> None:
    store.ingest(run_folder("k1", 1).train(range(1, 4), status="diverged").path)
    store.ingest(run_folder("k1", 2).train(range(1, 3), status="oom").path)
    assert store.runs()[0].status == "oom"


def test_curves_values_and_filters(run_folder: Make, store: Store) -> None:
    for key, case in (("k1", "a"), ("k2", "b")):
        run = run_folder(key, case=case)
        run.writer.measure(1, {"loss": 2.0, "mfu": None})
        run.writer.measure(1, {"quant_amax": 4.0}, "layers.0")
        run.writer.measure(1, {"quant_amax": 5.0}, "layers.1")
        store.ingest(run.path)
    with store:
        assert store.curves(["k1", "k2", "k3"], "loss") == {"k1": [(1, 2.0)], "k2": [(1, 2.0)]}
        assert store.curves(["k2"], "quant_amax", None) == {"k2": [(1, 4.0), (1, 5.0)]}
        assert store.curves(["k2"], "quant_amax", "layers.1") == {"k2": [(1, 5.0)]}
        assert store.curves(["k2"], "quant_amax") == {}
        assert store.curve("k1", "mfu") == [] and store.curves([], "loss") == {}
        assert store.values(["k1"], ["quant_amax", "loss", "mfu"]) == [
            ("k1", "loss", "", 1, 2.0),
            ("k1", "quant_amax", "layers.0", 1, 4.0),
            ("k1", "quant_amax", "layers.1", 1, 5.0),
        ]
        assert [row.key for row in store.runs(case="b")] == ["k2"]
        assert [row.key for row in store.runs(keys=["k1"])] == ["k1"]
        assert store.runs(keys=[]) == []


def test_views(run_folder: Make, store: Store) -> None:
    run = run_folder()
    for step, tokens_per_s in enumerate((10.0, 30.0, 20.0), 1):
        run.writer.measure(step, {"tokens_per_s": tokens_per_s, "step_ms": 1.0, "mfu": None})
        run.writer.measure(step, {"peak_bytes": step * 100}, "total")
        run.writer.measure(
            step, {"quant_sqnr_db": 30.0 - step, "quant_clipped_fraction": step / 8}, "layers.0"
        )
    store.ingest(run.path)
    assert store.query("SELECT tokens_per_s, step_ms, mfu, fidelity FROM throughput")[1] == [
        (20.0, 1.0, None, "native")
    ]
    assert store.query("SELECT category, peak_bytes FROM memory_peaks")[1] == [("total", 300.0)]
    health = store.query(
        "SELECT scope, clipped_fraction_max, amax_max, sqnr_db_min FROM quantization_health"
    )[1]
    assert health == [("layers.0", 3 / 8, None, 27.0)]
    assert store.query("SELECT * FROM loss_curves")[1] == []


def test_attempt_numbers_heed_rows_and_folders(run_folder: Make, store: Store, tmp_path: Path) -> None:
    journals = tmp_path / "journals"
    assert store.next_attempt("k1", journals) == 1
    store.ingest(run_folder("k1", 1).train(range(1, 2)).path)
    assert store.next_attempt("k1") == 2
    run_folder("k1", 4)
    assert store.next_attempt("k1", journals) == 5


def test_final_checkpoint_of_an_ok_run_only(run_folder: Make, store: Store) -> None:
    for attempt, status in ((1, "diverged"), (2, "ok")):
        run = run_folder("k1", attempt)
        run.writer.checkpoint(3, f"sha{attempt}", final=True)
        run.writer.end(status)
        store.ingest(run.path)
        assert store.final_checkpoint("k1") == (None if status != "ok" else "sha2")


def test_skipped_runs(run_folder: Make, store: Store) -> None:
    request = run_folder("k1", 1).request
    store.skip(request, "its base k0 diverged")
    store.skip(request | {"attempt": 2}, "its base k0 is oom")
    assert [(row.run_id, row.status, row.reason) for row in store.runs()] == [
        ("k1.1", "skipped", "its base k0 is oom")
    ]
    assert store.runs()[0].notes == request["auto"]
    assert store.next_attempt("k1") == 1
    run = run_folder("k1", 2).train(range(1, 3))
    store.ingest(run.path)
    assert [row.status for row in store.runs()] == ["ok"]
    store.skip(request, "its base has no checkpoint")
    assert [row.status for row in store.runs()] == ["ok"]
    assert len(store.curve("k1", "loss")) == 2


def test_a_tree(run_folder: Make, store: Store, tmp_path: Path) -> None:
    journals = tmp_path / "journals"
    assert store.ingest_tree(journals) == 0
    run_folder("k1", 1).train(range(1, 3), status=None)
    run_folder("k1", 2).train(range(1, 3))
    running = run_folder("k2", 1).train(range(1, 3), status=None)
    (journals / "k3" / "1").mkdir(parents=True)
    with (journals / "k2" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert store.ingest_tree(journals) == 2
        assert {row.key: row.status for row in store.runs()} == {"k1": "ok"}
        running.writer.end("ok")
        assert store.ingest_tree(journals) == 1
    assert store.ingest_tree(journals) == 0
    assert {row.key: row.status for row in store.runs()} == {"k1": "ok", "k2": "ok"}
    assert store.query("SELECT run_id, status FROM runs ORDER BY run_id")[1][0] == ("k1.1", "interrupted")
    run_folder("k4", 1).train(range(1, 3), status=None)
    with (journals / "k4" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert store.ingest_tree(journals, skip_locked=False) == 1


def test_a_bad_folder_does_not_keep_the_others_out(run_folder: Make, store: Store, tmp_path: Path) -> None:
    (run_folder("k1").train(range(1, 3)).path / "run.json").write_text("{")
    run_folder("k2").train(range(1, 3))
    with pytest.raises(BadRunFolder, match="k1"):
        store.ingest_tree(tmp_path / "journals")
    assert [row.key for row in store.runs()] == ["k2"]


VERDICT = {
    "case_name": "a_case", "size": "laptop", "claim_id": "c1", "verdict": "reproduced", "reason": "it is",
    "measure": "final_loss_gap", "effect": 0.5, "low": 0.4, "high": float("inf"), "confidence": 0.95,
    "num_pairs": 3, "seeds_needed": None, "fidelity": "emulated", "machine": "M", "claim": {"id": "c1"},
    "pairs": [[0, 0.5]], "run_keys": ["k1", "k2"], "suite_version": "0.1.0",
}  # fmt: skip


def test_verdicts_are_replaced_by_case_size_and_machine(store: Store) -> None:
    noon = datetime(2026, 1, 1, 12, tzinfo=timezone(timedelta(hours=2)))
    store.save_verdicts([VERDICT, VERDICT | {"claim_id": "c2", "decided_at": noon}])
    store.save_verdicts([VERDICT | {"machine": "N", "verdict": "differs"}])
    assert [(row["claim_id"], row["machine"]) for row in store.verdicts()] == [
        ("c1", "M"),
        ("c1", "N"),
        ("c2", "M"),
    ]
    first, _, second = store.verdicts(case="a_case")
    assert {name: first[name] for name in VERDICT} == VERDICT
    assert second["decided_at"] == datetime(2026, 1, 1, 10)
    store.save_verdicts([VERDICT])
    assert [(row["claim_id"], row["machine"]) for row in store.verdicts()] == [("c1", "M"), ("c1", "N")]
    assert store.verdicts(case="other") == []
    with pytest.raises(ValueError, match="soon"):
        store.save_verdicts([VERDICT | {"verdict": "differs"}, VERDICT | {"decided_at": "soon"}])
    assert store.verdicts()[0]["verdict"] == "reproduced", "all are replaced or none"


@pytest.mark.parametrize(
    "sql",
    [
        "DELETE FROM runs",
        "COPY runs TO '{}/x.csv'",
        "ATTACH '{}/other.duckdb' AS o",
        "SELECT * FROM read_text('/etc/hostname')",
        "SET enable_external_access = true",
        "INSTALL httpfs",
        "SELEC 1",
        "SELECT * FROM nothing",
    ],
)
def test_a_users_query_can_do_no_harm(sql: str, run_folder: Make, store: Store, tmp_path: Path) -> None:
    store.ingest(run_folder().train(range(1, 3)).path)
    with store, pytest.raises(QueryError):
        store.query(sql.format(tmp_path))
    assert len(store.runs()) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["journals", "suite.duckdb"]


def test_a_query_has_names_and_parameters(run_folder: Make, store: Store) -> None:
    store.ingest(run_folder().train(range(1, 3)).path)
    assert store.query("SELECT key, attempt + ? AS n FROM runs", [1]) == (["key", "n"], [("k1", 2)])
    with store:
        store.runs()
        assert store.query("SELECT 1 AS one") == (["one"], [(1,)])
        assert len(store.runs()) == 1


def test_reading_what_is_not_there(tmp_path: Path, store: Store) -> None:
    absent = Store(tmp_path / "no.duckdb", read_only=True)
    for read in (absent.runs, lambda: absent.query("SELECT 1"), lambda: store.query("SELECT 1")):
        with pytest.raises(NoDatabase, match="suite run"):
            read()
    assert store.runs() == [] and store.verdicts() == [] and store.resume_checkpoint("k1") is None


def test_a_file_that_is_no_database_of_ours(tmp_path: Path) -> None:
    (tmp_path / "text.duckdb").write_text("hello")
    with pytest.raises(StoreError, match=r"cannot use .*suite ingest"):
        Store(tmp_path / "text.duckdb").runs()
    Store(tmp_path / "damaged.duckdb").save_verdicts([])
    content = bytearray((tmp_path / "damaged.duckdb").read_bytes())
    content[8192:8200] = b"\xff" * 8
    (tmp_path / "damaged.duckdb").write_bytes(content)
    with pytest.raises(StoreError, match=r"Corrupt.*suite ingest"):
        Store(tmp_path / "damaged.duckdb").runs()
    import duckdb

    duckdb.connect(str(tmp_path / "other.duckdb")).close()
    with pytest.raises(StoreError, match="has no table of runs"):
        Store(tmp_path / "other.duckdb", read_only=True).runs()


def test_importing_the_store_is_cheap() -> None:
    code = "import sys, results.store; print({'duckdb', 'torch', 'numpy', 'pyarrow'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_the_registry() -> None:
    assert metric("loss").unit == "nats/token" and metric("loss").direction == "lower"
    assert all(info.name == name and info.meaning and info.unit for name, info in METRICS.items())
    with pytest.raises(KeyError, match="did you mean val_loss"):
        metric("val_los")
    assert len(set(STATUSES)) == 8
