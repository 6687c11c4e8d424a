"""`suite ingest` decides by content: journals, a session of benchmarks, or neither."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

SESSION = {
    "machine_info": {"node": "n", "cpu": {"brand_raw": "EPYC", "count": 2}},
    "commit_info": {"id": "abc"},
    "datetime": "2026-11-29T20:00:00+00:00",
    "benchmarks": [
        {
            "name": "test_a",
            "fullname": "t.py::test_a",
            "extra_info": {"ratio_to_copy": 1.5},
            "stats": {"median": 0.1},
        }
    ],
}


def test_a_file_of_benchmarks_and_the_page_it_makes(
    suite_command: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "b.json").write_text(json.dumps(SESSION))
    assert "b.json is in" in suite_command("ingest", "b.json").stderr
    again = suite_command("ingest", "b.json")
    assert again.code == 0 and "was in already" in again.stderr
    said = suite_command("query", "SELECT metric, scope, value FROM measurements ORDER BY ALL", "--json")
    assert {row["metric"]: row["value"] for row in said.data} == {
        "benchmark_median_s": 0.1,
        "ratio_to_copy": 1.5,
    }
    assert suite_command("status").code == 0
    assert suite_command("report").code == 0


def test_a_folder_of_sessions(suite_command: Callable[..., Any], tmp_path: Path) -> None:
    folder = tmp_path / "kept" / "Linux-CPython-3.11-64bit"
    folder.mkdir(parents=True)
    for day in (1, 2):
        document = {**SESSION, "datetime": f"2026-11-0{day}T20:00:00+00:00"}
        (folder / f"000{day}_b.json").write_text(json.dumps(document))
    (folder / "other.json").write_text("{}")
    said = suite_command("ingest", "kept")
    assert said.code == 0 and said.stderr.count("is in") == 2


def test_a_file_that_is_neither(suite_command: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"benchmarks": 3}')
    said = suite_command("ingest", "x.json")
    assert said.code != 0 and "x.json is not of pytest-benchmark: it has no benchmarks" in said.stderr
    assert "Traceback" not in said.stderr
