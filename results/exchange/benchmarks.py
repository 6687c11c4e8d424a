"""Sessions of pytest-benchmark as runs: one run a session, one scope a benchmark.

    pytest tests/benchmarks --benchmark-json=kernels.json
    suite ingest kernels.json

A session is an attempt of one key per machine, known by its start time like any other run, so that history, merging and
export need nothing of their own. Times go to `measurements` (`benchmark_*_s`, each round as a step of
`benchmark_round_s`), as does `extra_info["ratio_to_copy"]`; whatever else the file says stays in the run's `spec`, and
`session_document` puts the two together again.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from results.database import StoreError
from results.environment import machine_name
from results.records import OK
from results.rows import find_run, save_environment, select_dicts, select_runs, write_run

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

TASK = "kernels"
"""`spec.task` of such a run."""
ROUND, RATIO = "benchmark_round_s", "ratio_to_copy"
_STATS = {
    "min": "benchmark_min_s",
    "median": "benchmark_median_s",
    "mean": "benchmark_mean_s",
    "max": "benchmark_max_s",
    "stddev": "benchmark_stddev_s",
    "rounds": "benchmark_rounds",
}
_NEEDED = {"benchmarks": list, "machine_info": dict, "datetime": str}

Row = tuple[str, int, int, str, str, float]


class BadBenchmarks(StoreError):  # noqa: N818
    """A file that is no session of pytest-benchmark, or one that contradicts what is stored."""


def is_session(path: Path) -> bool:
    """Whether the file looks like pytest-benchmark's, by its content."""
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(document, dict) and {"benchmarks", "machine_info"} <= document.keys()


def read_session(path: Path) -> dict[str, Any]:
    """The document of a pytest-benchmark file. Raises BadBenchmarks with what is wrong with it."""
    try:
        document: Any = json.loads(path.read_bytes())
    except OSError as error:
        raise BadBenchmarks(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise BadBenchmarks(
            f"{path} is no JSON ({error}); `pytest --benchmark-json=FILE` writes one"
        ) from None
    if not isinstance(document, dict):
        raise BadBenchmarks(f"{path} is not of pytest-benchmark: it holds a {type(document).__name__}")
    for name, kind in _NEEDED.items():
        if not isinstance(document.get(name), kind):
            raise BadBenchmarks(f"{path} is not of pytest-benchmark: it has no {name}")
    if not document["benchmarks"]:
        raise BadBenchmarks(f"{path} holds no benchmark: none was selected, or all were skipped")
    for number, entry in enumerate(document["benchmarks"], 1):
        if not isinstance(entry, dict) or not isinstance(entry.get("fullname"), str):
            raise BadBenchmarks(f"{path}: benchmark {number} has no fullname")
        if not isinstance(entry.get("stats"), dict):
            raise BadBenchmarks(f"{path}: benchmark {entry['fullname']} has no stats")
    try:
        _started_at(document)
    except ValueError:
        raise BadBenchmarks(f"{path}: datetime {document['datetime']!r} is not a time") from None
    return document


def ingest_session(connection: DuckDBPyConnection, path: Path) -> bool:
    """Take in a session, in the caller's transaction; False where it is in already.

    Raises BadBenchmarks for a file that is none, or that is another than the one stored for its machine and time.
    """
    document = read_session(path)
    environment = _environment(document)
    # Of the name and not of the environment: a new commit or Python is history of the same machine.
    key = _digest({"task": TASK, "machine": environment["machine"], "hostname": environment["hostname"]})[:16]
    started = _started_at(document)
    attempt, stored = find_run(connection, key, 1, started)
    fingerprint = _digest(document)
    if stored is not None:
        if stored["spec"].get("sha256") == fingerprint:
            return False
        raise BadBenchmarks(
            f"{path}: another session of {environment['machine']} at {document['datetime']} is stored already; "
            "one of the two files was changed"
        )
    run_id = f"{key}.{attempt}"
    rest, rows = _split(document, run_id)
    write_run(
        connection,
        {
            "run_id": run_id,
            "key": key,
            "attempt": attempt,
            "case_name": None,
            "size": None,
            "role": "benchmark",
            "labels": {},
            "spec": {"task": TASK, "sha256": fingerprint, "document": rest},
            "environment_id": save_environment(connection, environment),
            "status": OK,
            "reason": "",
            "fidelity": "native",
            "started_at": started,
            "ended_at": None,
            "notes": {},
            "command": "pytest --benchmark-json=FILE, then suite ingest FILE",
            "journal_bytes": {"0": path.stat().st_size},
        },
        is_stored=False,
    )
    appender = connection.appender("measurements")
    appender.append_rows(rows)
    appender.flush()
    return True


def session_document(connection: DuckDBPyConnection, run_id: str) -> dict[str, Any]:
    """The file that a stored session came from, value for value."""
    (row,) = select_runs(connection, "runs WHERE run_id = ?", [run_id])
    document: dict[str, Any] = row["spec"]["document"]
    entries = dict(zip(_scopes(document["benchmarks"]), document["benchmarks"], strict=True))
    fields = {metric: name for name, metric in _STATS.items()}
    for point in select_dicts(
        connection,
        "SELECT metric, scope, step, value FROM measurements WHERE run_id = ? ORDER BY ALL",
        [run_id],
    ):
        stats, metric = entries[point["scope"]]["stats"], point["metric"]
        if metric == ROUND:
            stats.setdefault("data", []).append(point["value"])
        elif metric in fields:
            stats[fields[metric]] = point["value"]
    return document


def _split(document: dict[str, Any], run_id: str) -> tuple[dict[str, Any], list[Row]]:
    """(the document without what becomes measurements, those)."""
    rest = copy.deepcopy(document)
    rows: list[Row] = []
    for scope, entry in zip(_scopes(rest["benchmarks"]), rest["benchmarks"], strict=True):
        stats = entry["stats"]
        for name, metric in _STATS.items():
            if _is_number(value := stats.get(name)):
                rows.append((run_id, 0, 0, metric, scope, float(value)))
                del stats[name]
        data = stats.get("data")
        if isinstance(data, list) and data and all(_is_number(value) for value in data):
            rows += [(run_id, 0, step, ROUND, scope, float(value)) for step, value in enumerate(data, 1)]
            del stats["data"]
        ratio = (entry.get("extra_info") or {}).get(RATIO)
        if _is_number(ratio):
            rows.append((run_id, 0, 0, RATIO, scope, float(ratio)))
    return rest, rows


def _scopes(entries: list[dict[str, Any]]) -> list[str]:
    """One scope a benchmark: its full name, numbered where a file has it more than once."""
    seen: Counter[str] = Counter()
    scopes = []
    for entry in entries:
        seen[entry["fullname"]] += 1
        count = seen[entry["fullname"]]
        scopes.append(entry["fullname"] if count == 1 else f"{entry['fullname']} ({count})")
    return scopes


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _environment(document: dict[str, Any]) -> dict[str, Any]:
    """The columns of `environments` that the file's own account of machine and commit gives."""
    machine = document["machine_info"]
    cpu = machine.get("cpu") or {}
    name = str(cpu.get("brand_raw") or machine.get("processor") or machine.get("machine") or "unknown CPU")
    num_cores = cpu.get("count")
    commit = document.get("commit_info") or {}
    has_commit = commit.get("id") and commit["id"] != "unversioned"
    return {
        "hostname": machine.get("node"),
        "machine": machine_name(name, num_cores, []) if num_cores else name,
        "cpu": name,
        "num_cores": num_cores,
        "os": f"{machine.get('system', '')} {machine.get('release', '')}".strip() or None,
        "python": machine.get("python_version"),
        "git_commit": f"{commit['id']}{'-dirty' if commit.get('dirty') else ''}" if has_commit else None,
        "details": {"source": "pytest-benchmark", "version": document.get("version")},
    }


def _started_at(document: dict[str, Any]) -> datetime:
    """UTC without a zone, as the database keeps times; a time without a zone is taken as UTC."""
    moment = datetime.fromisoformat(document["datetime"])
    return moment if moment.tzinfo is None else moment.astimezone(UTC).replace(tzinfo=None)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
