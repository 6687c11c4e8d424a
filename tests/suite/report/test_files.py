"""The files of a site: same bytes for the same database, nothing stale, downloads that read back."""

from __future__ import annotations

import csv
import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
from html_pages import read_page
from made_up_site import Built, make_plan

from results.store import Store
from suite.declare import Plan
from suite.paths import site_dir
from suite.report import build_site


def _bytes(site: Path) -> dict[str, bytes]:
    return {str(path.relative_to(site)): path.read_bytes() for path in site.rglob("*") if path.is_file()}


@pytest.fixture
def small(built: Built) -> Plan:
    """The plan with ten of its runs."""
    return replace(built.plan, runs=built.plan.runs[:10])


def test_same_database_gives_same_bytes_and_touches_nothing(
    built: Built, small: Plan, tmp_path: Path
) -> None:
    site = tmp_path / "site"
    index = build_site(built.out, built.store, [small], site)
    before = {path: path.stat().st_mtime_ns for path in site.rglob("*") if path.is_file()}
    assert build_site(built.out, built.store, [small], site) == index
    assert {path: path.stat().st_mtime_ns for path in before} == before
    build_site(built.out, built.store, [small], tmp_path / "elsewhere")
    assert _bytes(tmp_path / "elsewhere") == _bytes(site)


def test_pages_of_removed_runs_go_and_other_files_stay(built: Built, small: Plan, tmp_path: Path) -> None:
    site = tmp_path / "site"
    build_site(built.out, built.store, [small], site)
    (site / "notes.txt").write_text("mine")
    gone = small.runs[-1]
    assert (site / "runs" / f"{gone.key}.html").exists()
    build_site(built.out, built.store, [replace(small, runs=small.runs[:-1])], site)
    assert not list(site.rglob(f"{gone.key}*"))
    assert (site / "notes.txt").read_text() == "mine"
    assert (site / "runs" / f"{small.runs[1].key}.html").exists()


def test_a_manifest_cannot_make_the_builder_remove_files_outside(built: Built, tmp_path: Path) -> None:
    site, victim = tmp_path / "site", tmp_path / "victim.txt"
    site.mkdir()
    victim.write_text("keep")
    (site / "manifest.json").write_text(json.dumps({"files": ["../victim.txt", str(victim), "", 3]}))
    build_site(built.out, built.store, [], site)
    assert victim.read_text() == "keep"


def test_manifest_lists_what_is_there(built: Built) -> None:
    manifest = json.loads((built.site / "manifest.json").read_text())
    assert manifest["data_schema"] == 1
    assert manifest["num_claims"] == len(built.plan.case.claims)
    assert manifest["num_runs"] == len(built.plan.runs) - 1  # one was never started
    assert set(manifest["files"]) == set(_bytes(built.site)) - {"manifest.json"}


def test_downloads_read_back_to_what_was_measured(built: Built) -> None:
    run = next(
        run for run in built.plan.runs if built.store.status_of([run.key])[run.key].status == "diverged"
    )
    stored = built.store.curve(run.key, "loss")
    with (built.site / "data" / "runs" / f"{run.key}.csv").open() as stream:
        rows = [row for row in csv.DictReader(stream) if row["metric"] == "loss"]
    assert [int(row["step"]) for row in rows] == [step for step, _ in stored]
    assert all(
        float(row["value"]) == value or value != value for row, (_, value) in zip(rows, stored, strict=True)
    )
    content = json.loads(
        (built.site / "data" / "runs" / f"{run.key}.json").read_text(), parse_constant=pytest.fail
    )
    assert content["run"]["reason"] == "loss is NaN at step 31"
    assert content["measurements"]["loss"][""][-1] == [stored[-1][0], None]
    assert content["measurements"]["loss"][""][0] == list(stored[0])
    spec = json.loads((built.site / "data" / "runs" / f"{run.key}-spec.json").read_text())
    assert spec == run.spec.model_dump(mode="json")


def test_case_downloads(built: Built) -> None:
    name = "fp8_long_horizon_demo-laptop"
    with (built.site / "data" / f"{name}-runs.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert {row["key"]: row["status"] for row in rows}.keys() == {run.key for run in built.plan.runs}
    case = json.loads((built.site / "data" / f"{name}.json").read_text(), parse_constant=pytest.fail)
    assert {row["claim_id"] for row in case["verdicts"]} == {claim.id for claim in built.plan.case.claims}


def test_vendored_files_are_what_they_claim_to_be() -> None:
    folder = site_dir() / "static" / "vendor"
    listed = dict(reversed(line.split()) for line in (folder / "SHA256SUMS").read_text().splitlines())
    assert set(listed) == {path.name for path in folder.iterdir()} - {"SHA256SUMS"}
    for name, digest in listed.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest


def test_nothing_run_yet(tmp_path: Path) -> None:
    plan = make_plan(tmp_path)
    with Store(tmp_path / "suite.duckdb") as store:
        index = read_page(build_site(tmp_path, store, [plan]))
    assert "7 not run" in index.text
    assert "82 not run" in index.text
    assert "to run them: suite run fp8_long_horizon_demo --size laptop" in index.text
    case = read_page(tmp_path / "site" / "cases" / "fp8_long_horizon_demo-laptop.html")
    assert not case.all("figure")
    assert len(case.all("td", "st-not-run")) == 81


def test_no_case_at_all(tmp_path: Path) -> None:
    with Store(tmp_path / "suite.duckdb") as store:
        page = read_page(build_site(tmp_path, store, []))
    assert "No claim is judged yet." in page.text


def test_pages_keep_to_their_budget(built: Built) -> None:
    assert built.index.stat().st_size < 60_000
    text = built.case.read_text()
    embedded = sum(len(figure.one("script").text) for figure in read_page(built.case).all("figure", "chart"))
    assert len(text) - embedded < 400_000
    static = sum(path.stat().st_size for path in (built.site / "static").rglob("*") if path.is_file())
    assert static < 100_000
