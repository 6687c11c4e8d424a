"""Sessions of pytest-benchmark in the database: nothing lost, nothing twice, machines and days kept apart."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from results.exchange.benchmarks import BadBenchmarks, is_session, session_document
from results.store import Store


def entry(name: str, ratio: float | None = 1.25, **info: Any) -> dict[str, Any]:
    """A benchmark as pytest-benchmark 5 writes it."""
    extra = {**({} if ratio is None else {"ratio_to_copy": ratio}), "format": "e4m3:current", **info}
    return {
        "group": None,
        "name": name,
        "fullname": f"tests/benchmarks/test_cast.py::{name}",
        "params": {"format": "e4m3", "elements": 1024},
        "param": "e4m3-1024",
        "extra_info": extra,
        "options": {"disable_gc": False, "timer": "perf_counter", "min_rounds": 5, "warmup": False},
        "stats": {
            "min": 0.1 + 0.2, "max": 0.5, "mean": 0.4, "stddev": 1e-17, "rounds": 3, "median": 0.4, "iqr": 0.1,
            "q1": 0.3, "q3": 0.5, "outliers": "1;2", "ops": 2.5, "total": 1.2, "iterations": 1,
            "data": [0.30000000000000004, 0.5, 0.4],
        },
    }  # fmt: skip


def session(
    *entries: dict[str, Any], when: str = "2026-11-29T20:00:00.123456+00:00", node: str = "node1"
) -> dict[str, Any]:
    return {
        "machine_info": {
            "node": node,
            "machine": "x86_64",
            "system": "Linux",
            "release": "6.1",
            "python_version": "3.11.7",
            "cpu": {"brand_raw": "AMD EPYC 9B45", "count": 2, "flags": ["avx2"]},
        },
        "commit_info": {"id": "abc123", "dirty": True, "branch": "main", "time": "2026-11-29T19:00:00+00:00"},
        "benchmarks": list(entries or (entry("test_cast[a]"), entry("test_cast[b]", 2.5))),
        "datetime": when,
        "version": "5.3.1",
    }


Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def made(document: Any, name: str = "b.json") -> Path:
        path = tmp_path / name
        path.write_text(json.dumps(document))
        return path

    return made


def run_ids(store: Store) -> list[str]:
    return [run_id for (run_id,) in store.query("SELECT run_id FROM runs ORDER BY key, attempt")[1]]


def restored(store: Store, run_id: str) -> dict[str, Any]:
    with store._database.session() as connection:
        return session_document(connection, run_id)


def test_nothing_is_lost(store: Store, write: Write) -> None:
    document = session()
    assert store.ingest_benchmarks(write(document))
    (run_id,) = run_ids(store)
    assert restored(store, run_id) == document


def test_a_second_time_changes_nothing(store: Store, write: Write) -> None:
    path = write(session())
    assert store.ingest_benchmarks(path)
    before = store.query("SELECT * FROM measurements ORDER BY ALL")[1]
    assert before and not store.ingest_benchmarks(path)
    assert store.query("SELECT * FROM measurements ORDER BY ALL")[1] == before
    assert len(run_ids(store)) == 1


def test_what_stands_in_the_tables(store: Store, write: Write) -> None:
    store.ingest_benchmarks(write(session()))
    _, rows = store.query(
        "SELECT metric, step, value FROM measurements WHERE scope = 'tests/benchmarks/test_cast.py::test_cast[b]' "
        "ORDER BY ALL"
    )
    assert ("ratio_to_copy", 0, 2.5) in rows and ("benchmark_median_s", 0, 0.4) in rows
    assert [(step, value) for metric, step, value in rows if metric == "benchmark_round_s"] == [
        (1, 0.30000000000000004), (2, 0.5), (3, 0.4),
    ]  # fmt: skip
    ((machine, hostname, commit, system, status, fidelity, case, started),) = store.query(
        "SELECT machine, hostname, git_commit, os, status, fidelity, case_name, started_at "
        "FROM runs JOIN environments USING (environment_id)"
    )[1]
    assert (machine, hostname, commit, system) == (
        "AMD EPYC 9B45 2 cores",
        "node1",
        "abc123-dirty",
        "Linux 6.1",
    )
    assert (status, fidelity, case) == ("ok", "native", None)
    assert started.isoformat() == "2026-11-29T20:00:00.123456"


def test_days_are_attempts_and_machines_are_keys(store: Store, write: Write) -> None:
    later = "2026-11-30T08:00:00+01:00"
    assert store.ingest_benchmarks(write(session()))
    assert store.ingest_benchmarks(write(session(entry("test_cast[a]", 1.5), when=later)))
    assert store.ingest_benchmarks(write(session(node="node2")))
    ids = run_ids(store)
    assert len(ids) == 3 and len({run_id.partition(".")[0] for run_id in ids}) == 2
    (_, rows) = store.query("SELECT started_at, value FROM measurements JOIN runs USING (run_id) "
                            "WHERE metric = 'ratio_to_copy' AND scope LIKE '%[a]' ORDER BY ALL")  # fmt: skip
    assert [(str(at), value) for at, value in rows] == [
        ("2026-11-29 20:00:00.123456", 1.25), ("2026-11-29 20:00:00.123456", 1.25), ("2026-11-30 07:00:00", 1.5),
    ]  # fmt: skip


def test_a_changed_file_of_the_same_moment_is_refused(store: Store, write: Write) -> None:
    store.ingest_benchmarks(write(session()))
    changed = copy.deepcopy(session())
    changed["benchmarks"][0]["stats"]["median"] = 0.1
    with pytest.raises(BadBenchmarks, match="one of the two files was changed"):
        store.ingest_benchmarks(write(changed))


def test_sessions_travel_by_merge(store: Store, write: Write, tmp_path: Path) -> None:
    store.ingest_benchmarks(write(session()))
    there = Store(tmp_path / "there.duckdb")
    there.ingest_benchmarks(write(session(when="2026-11-30T08:00:00+00:00")))
    assert there.merge(store.path).num_new == 1 and there.merge(store.path).num_new == 0
    ids = run_ids(there)
    assert len(ids) == 2
    assert {restored(there, run_id)["datetime"][:10] for run_id in ids} == {"2026-11-29", "2026-11-30"}


def test_a_name_that_a_file_has_twice(store: Store, write: Write) -> None:
    document = session(entry("test_cast[a]", 1.0), entry("test_cast[a]", 2.0))
    store.ingest_benchmarks(write(document))
    assert restored(store, run_ids(store)[0]) == document


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("not json", "is no JSON"),
        ("[1]", "holds a list"),
        ('{"a": 1}', "has no benchmarks"),
        ('{"benchmarks": [], "datetime": ""}', "has no machine_info"),
        ('{"benchmarks": [], "machine_info": {}, "datetime": "2026-11-29"}', "holds no benchmark"),
        ('{"benchmarks": [{}], "machine_info": {}, "datetime": "2026-11-29"}', "benchmark 1 has no fullname"),
        (
            '{"benchmarks": [{"fullname": "x"}], "machine_info": {}, "datetime": "2026-11-29"}',
            "benchmark x has no stats",
        ),
        (
            '{"benchmarks": [{"fullname": "x", "stats": {}}], "machine_info": {}, "datetime": "noon"}',
            "'noon' is not a time",
        ),
    ],
)
def test_files_that_are_none(store: Store, tmp_path: Path, text: str, word: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(BadBenchmarks, match=word) as error:
        store.ingest_benchmarks(path)
    assert str(path) in str(error.value)
    assert run_ids(store) == []


def test_content_decides(write: Write, tmp_path: Path) -> None:
    assert is_session(write(session()))
    assert not is_session(write({"benchmarks": []}, "half.json")) and not is_session(tmp_path / "absent")


def test_a_file_that_pytest_benchmark_writes_now(store: Store, tmp_path: Path) -> None:
    pytest.importorskip("pytest_benchmark")
    (tmp_path / "test_it.py").write_text(
        "def test_sum(benchmark):\n"
        "    benchmark.extra_info['ratio_to_copy'] = 1.5\n"
        "    benchmark.pedantic(sum, args=([1, 2],), rounds=4)\n"
    )
    path = tmp_path / "now.json"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        f"--benchmark-json={path}",
        "test_it.py",
    ]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    assert store.ingest_benchmarks(path)
    assert restored(store, run_ids(store)[0]) == json.loads(path.read_text())
