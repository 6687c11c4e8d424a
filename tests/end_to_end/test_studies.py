"""A study through the real command: plan, run, verdict, page."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CASE = """\
question: What do formats hold, and what does a cast keep?
task: formats
matrix:
  format: [fp16, bf16]
include:
  - {task: tensors, cast: ["e4m3:current", "mxfp8:up"], tensor: {rows: 32, cols: 64}, seed: [0, 1]}
claims:
  - {id: max, measure: format_max, of: {format: fp16}, expect: {within: [65504, 65504]}}
  - {id: wrong, measure: format_max, of: {format: bf16}, expect: {at_most: 65504}}
  - {id: finer, measure: format_epsilon_ratio, of: {format: bf16}, against: {format: fp16}, expect: {within: [8, 8]}}
  - {id: noise, measure: "quant_sqnr_db[bulk]", of: {cast: "e4m3:current"}, expect: {above: 20}}
figures:
  - {title: Noise, measure: "quant_sqnr_db[bulk]", x: cast}
tables:
  - {title: Constants, rows: format, columns: [format_max, format_epsilon]}
"""


def suite(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "suite", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("studies")
    (path / "case.yaml").write_text(CASE)
    suite(path, "run", "case.yaml", "--jobs", "1")
    return path


def test_verdicts(folder: Path) -> None:
    verdicts = {v["claim_id"]: v for v in json.loads(suite(folder, "claims", "case.yaml", "--json"))}
    words = {name: verdict["verdict"] for name, verdict in verdicts.items()}
    assert words == {"max": "reproduced", "wrong": "differs", "finer": "reproduced", "noise": "reproduced"}
    assert "an exact value, not a sample, so one run decides" in verdicts["max"]["reason"]
    assert verdicts["max"]["low"] is None and verdicts["noise"]["low"] is not None


def test_the_page_has_figures_and_no_empty_sections(folder: Path) -> None:
    page = (folder / "out/site/cases/case-default.html").read_text()
    assert 'id="figures"' in page and "65504" in page
    for section in ("gaps", "curves", "health", "memory"):
        assert f'id="{section}"' not in page
    assert "final training loss" not in page


def test_a_study_s_own_page_says_what_it_read(folder: Path) -> None:
    rows = json.loads(suite(folder, "status", "case.yaml", "--json"))
    key = next(row["key"] for row in rows if row["labels"].get("cast") == "mxfp8:up")
    page = (folder / f"out/site/runs/{key}.html").read_text()
    assert "quant_sqnr_db[bulk]" in page and "mxfp8:up" in page
    assert "optimizer.lr" not in page and "0 tokens" not in page


def test_the_plan_knows_the_time_of_studies_that_ran(folder: Path) -> None:
    plan = json.loads(suite(folder, "plan", "case.yaml", "--json"))
    assert plan["num_done"] == len(plan["runs"]) == 6
    assert all(run["seconds"] > 0 and run["bytes"] is None for run in plan["runs"])
    assert plan["runs"][0]["seconds_source"] == "1 earlier run of this study here"
    changed = json.loads(suite(folder, "plan", "case.yaml", "--json", "--set", "tensor.rows=16"))
    sources = {run["seconds_source"] for run in changed["runs"] if run["task"] == "tensors"}
    assert sources == {"4 earlier runs of task tensors here"}
