"""A user's mistake: a message that helps, the right exit status, no traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

import suite.declare
import suite.execute.scheduler
from suite.execute.order import priorities

MISTAKES = [
    (["rnu"], 2, "'run'"),
    (["run"], 2, "case"),
    (["run", "case.yaml", "--job", "3"], 2, "--jobs"),
    (["run", "case.yaml", "--jobs", "0"], 2, "--jobs"),
    (["run", "case.yaml", "--jobs", "many"], 2, "--jobs"),
    (["run", "no-such-case"], 2, "suite list cases"),
    (["run", "."], 2, "."),
    (["run", "case.yaml", "--size", "huge"], 2, "huge"),
    (["run", "case.yaml", "--set", "tokns=3"], 2, "tokens"),
    (["run", "case.yaml", "--set", "tokens"], 2, "tokens"),
    (["run", "case.yaml", "--only", "precision"], 2, "label=value"),
    (["run", "case.yaml", "--only", "precison=bf16"], 2, "precision"),
    (["run", "case.yaml", "--only", "precision=bf61"], 2, "did you mean 'bf16'"),
    (["run", "case.yaml", "--out", "file"], 4, "--out"),
    (["run", "case.yaml", "--out", "file/out"], 4, "--out"),
    (["status"], 2, "suite run CASE"),
    (["status", "--out", "nowhere"], 2, "nowhere"),
    (["claims"], 2, "suite run CASE"),
    (["report"], 2, "suite run CASE"),
    (["query", "SELECT 1"], 2, "suite run CASE"),
    (["query"], 2, "sql"),
    (["export", "-o", "x"], 2, "suite run CASE"),
    (["export", "-o", "x", "--format", "xml"], 2, "parquet, csv, jsonl"),
    (["status", "--size", "laptop"], 2, "need a CASE"),
    (["ingest", "nowhere"], 2, "not a folder"),
    (["ingest", "."], 2, "no run"),
    (["merge", "nowhere"], 2, "does not exist"),
    (["merge", "file"], 4, "file"),
    (["list", "modles"], 2, "did you mean 'models'"),
    (["schema", "-o", "nowhere/schema.json"], 4, "nowhere/schema.json"),
]


@pytest.mark.parametrize(
    ("arguments", "code", "hint"),
    MISTAKES,
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes(suite_command, arguments: list[str], code: int, hint: str) -> None:
    Path("file").write_text("")
    said = suite_command(*arguments)
    assert (said.code, said.stdout) == (code, ""), said.stderr
    assert hint in said.stderr
    assert "Traceback" not in said.stderr
    assert not list(Path().glob("**/crash-*.txt"))


def test_bad_launch_mode(suite_command, monkeypatch) -> None:
    monkeypatch.setenv("SUITE_LAUNCH", "threads")
    said = suite_command("run", "case.yaml")
    assert said.code == 4
    assert "fork or spawn" in said.stderr


def test_worker_that_cannot_be_loaded(suite_command, monkeypatch) -> None:
    monkeypatch.setenv("SUITE_LAUNCH", "fork")
    monkeypatch.setenv("PYTHONPATH", "")
    said = suite_command("run", "case.yaml")
    assert said.code == 4
    assert "No module named 'fake_worker'" in said.stderr


def test_busy_database(suite_command, sites, monkeypatch) -> None:
    from results.database import DatabaseBusy

    def busy(*_: object, **__: object) -> None:
        raise DatabaseBusy("out/suite.duckdb is still in use by process 1 after 60 s")

    monkeypatch.setattr("results.store.Store.ingest_tree", busy)
    said = suite_command("run", "case.yaml")
    assert said.code == 4
    assert "still in use" in said.stderr


def test_fault_of_the_suite_itself(suite_command, monkeypatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(suite.execute.scheduler, "priorities", broken)
    said = suite_command("run", "case.yaml", "--out", "here")
    assert said.code == 4
    assert said.stderr.count("\n") <= 2
    (crash,) = Path("here").glob("crash-*.txt")
    assert f"unexpected ZeroDivisionError: a bug; the traceback is in {crash}" in said.stderr
    text = crash.read_text()
    assert "suite run case.yaml --out here" in text and "Traceback" in text
    assert priorities([]) == {}


def test_interrupt_outside_a_run(suite_command, monkeypatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(suite.declare, "load_case", interrupted)
    assert suite_command("run", "case.yaml").code == 130
