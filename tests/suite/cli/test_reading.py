"""Verbs that read, move or describe results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import suite.doctor
from suite.execute.folder import OutFolder, key_lock


@pytest.fixture
def with_runs(suite_command, sites):
    assert suite_command("run", "case.yaml").code == 0
    return suite_command


def test_status(suite_command, sites) -> None:
    suite_command("run", "case.yaml", "--only", "precision=fp32", "--no-report")
    counts = suite_command("status", "--json").data
    assert [(row["case"], row["runs"], row["ok"], row["not_ok"]) for row in counts] == [("case", 3, 3, "")]
    rows = suite_command("status", "case.yaml", "--json").data
    assert [(row["labels"]["precision"], row["status"]) for row in rows] == [("fp32", "ok")] * 3 + [
        ("bf16", "to do")
    ] * 3
    lock = key_lock(OutFolder(Path("out")), rows[3]["key"])
    assert lock.acquire()
    assert [row["status"] for row in suite_command("status", "case.yaml", "--json").data][3] == "running"
    lock.release()
    table = suite_command("status", "case.yaml").stdout.splitlines()
    assert len(table) == 7 and "precision=fp32 seed=0" in table[1]


def test_status_of_a_case_whose_file_is_gone(with_runs) -> None:
    Path("case.yaml").unlink()
    assert len(with_runs("status", "case", "--json").data) == 6


def test_query(with_runs) -> None:
    said = with_runs("query", "SELECT count(*) AS runs, 0.5 AS half, NULL AS nothing FROM runs")
    assert [line.split() for line in said.stdout.splitlines()] == [
        ["runs", "half", "nothing"],
        ["6", "0.5", "-"],
    ]
    assert with_runs("query", "SELECT 'nan'::DOUBLE AS x, 1 AS y", "--json").data == [{"x": None, "y": 1}]
    assert with_runs("query", "SELECT 1 AS x, 2 AS x", "--json").data == [{"x": 1, "x_1": 2}]
    nothing = with_runs("query", " ")
    assert (nothing.code, nothing.stdout) == (2, "") and "no SQL" in nothing.stderr


def test_query_cannot_write(with_runs) -> None:
    said = with_runs("query", "DELETE FROM runs")
    assert said.code == 2
    assert "Traceback" not in said.stderr
    assert with_runs("query", "SELECT count(*) AS n FROM runs", "--json").data == [{"n": 6}]


def test_export_merge_ingest(with_runs) -> None:
    said = with_runs("export", "-o", "tables", "--format", "parquet")
    assert all(Path(line).is_file() for line in said.stdout.splitlines())
    for source in ("tables", "out", "out/suite.duckdb"):
        merged = with_runs("merge", source, "--out", f"merged-{len(source)}")
        assert merged.code == 0, merged.stderr
        assert "6 new runs" in merged.stderr
        assert "0 new runs" in with_runs("merge", source, "--out", f"merged-{len(source)}").stderr
    assert "6 runs brought something new" in with_runs("ingest", "out", "--out", "again").stderr
    assert "0 runs brought something new" in with_runs("ingest", "out/journals", "--out", "again").stderr
    ours = with_runs("query", "SELECT * EXCLUDE (environment_id) FROM runs ORDER BY ALL", "--json").data
    assert (
        with_runs(
            "query", "SELECT * EXCLUDE (environment_id) FROM runs ORDER BY ALL", "--json", "--out", "again"
        ).data
        == ours
    )


@pytest.mark.parametrize(
    "kind",
    [
        "cases",
        "models",
        "precisions",
        "optimizers",
        "parallelisms",
        "ageing",
        "papers",
        "probes",
        "metrics",
        "measures",
    ],
)
def test_list(suite_command, kind: str) -> None:
    rows = suite_command("list", kind, "--json").data
    assert rows and all(row.keys() == rows[0].keys() for row in rows)
    assert len(suite_command("list", kind).stdout.splitlines()) == len(rows) + 1


def test_list_models_counts_parameters(suite_command) -> None:
    counts = {row["name"]: row["parameters"] for row in suite_command("list", "models", "--json").data}
    assert counts["llama2-7b"] == 6_738_415_616


def test_schema(suite_command) -> None:
    printed = suite_command("schema")
    assert "question" in printed.data["properties"]
    said = suite_command("schema", "-o", "case.schema.json")
    assert (said.code, said.stdout) == (0, "")
    assert json.loads(Path("case.schema.json").read_text()) == printed.data


def test_claims_are_registered(with_runs) -> None:
    rows = with_runs("claims", "--json").data
    assert {row["claim_id"]: row["verdict"] for row in rows} == {"same": "reproduced", "worse": "differs"}
    assert with_runs("claims").stdout.startswith("case, size default\nclaim ")
    assert "no verdicts on tweo2025" in with_runs("claims", "--paper", "tweo2025").stderr


def test_doctor(suite_command, monkeypatch) -> None:
    said = suite_command("doctor", "--json")
    checks = {check["name"]: check for check in said.data}
    assert said.code == 0, said.stderr
    assert {
        "Python",
        "torch",
        "cores",
        "load",
        "memory",
        "disk",
        "database",
        "GPU",
        "extra te",
    } <= checks.keys()
    assert not Path("out").exists() and not list(Path().glob(".*")), "it leaves nothing"
    monkeypatch.setattr(suite.doctor, "_version", lambda name: None)
    said = suite_command("doctor")
    assert said.code == 4
    assert "torch" in said.stderr and "pip install lowprec-suite" in said.stdout
    assert "pip install 'lowprec-suite[te]'" in said.stdout


def test_doctor_finds_a_folder_it_cannot_use(suite_command) -> None:
    Path("file").write_text("")
    said = suite_command("doctor", "--out", "file/out")
    assert said.code == 4
    assert "out folder" in said.stderr


@pytest.mark.parametrize(
    ("capability", "formats"),
    [
        ("10.0", "NVFP4"),
        ("9.0", "FP16, BF16, FP8"),
        ("8.9", "FP8"),
        ("8.0", "BF16"),
        ("6.1", "none"),
        ("[N/A]", "unknown"),
    ],
)
def test_native_formats(capability: str, formats: str) -> None:
    assert formats in suite.doctor.native_formats(capability)
