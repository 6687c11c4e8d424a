"""Text from case files, papers and runs is shown, never obeyed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from html_pages import Element, read_page
from made_up_site import ENVIRONMENT, make_plan, request_of, write_run

from results.journal import JournalWriter
from results.store import Store
from suite.judge import judge
from suite.report import build_site
from suite.report.downloads import csv_text, json_script

EVIL = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>&amp;</svg>{{ 7 * 7 }}"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("hostile")
    plan = make_plan(out, question=EVIL)
    case = replace(plan.case, notes=f"{EVIL}\n\n{EVIL}", name="a/../b <i>")
    plan = replace(plan, case=case, size="x/../<b>", size_reason=EVIL)
    store = Store(out / "suite.duckdb")
    for run in plan.runs[:4]:
        write_run(out, plan, run)
        store.ingest(out / "journals" / run.key / "1")
    run = replace(plan.runs[4], labels={**plan.runs[4].labels, "ageing": EVIL})
    plan = replace(plan, runs=(*plan.runs[:4], run, *plan.runs[5:]))
    folder = out / "journals" / run.key / "1"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps(request_of(run, plan) | {"command": EVIL}))
    journal = JournalWriter(folder / "rank0.journal")
    journal.start(ENVIRONMENT | {"machine": EVIL, "details": {EVIL: EVIL}})
    journal.note(EVIL, EVIL, EVIL)
    journal.measure(1, {"quant_flushed_fraction": 0.5, "alignment_cosine_max": 0.5}, EVIL)
    journal.measure(2, {"alignment_cosine_max": 0.6}, EVIL)
    journal.end("crashed", EVIL)
    journal.close()
    store.ingest(folder)
    rows = [verdict.as_row() | {"reason": EVIL, "machine": EVIL} for verdict in judge(plan, store)]
    store.save_verdicts(rows)
    return build_site(out, store, [plan]).parent


def _pages(site: Path) -> dict[Path, Element]:
    return {path: read_page(path) for path in site.rglob("*.html")}


def test_no_element_comes_from_text(site: Path) -> None:
    pages = _pages(site)
    assert len(pages) == 7
    for path, page in pages.items():
        for script in page.all("script"):
            assert "src" in script.attributes or script.attributes.get("type") == "application/json", path
        assert not page.all("img"), path
        assert not [e for e in page.all() if any(name.startswith("on") for name in e.attributes)], path


def test_the_text_is_there_to_read(site: Path) -> None:
    index = read_page(site / "index.html")
    assert EVIL in index.text
    assert "{{ 7 * 7 }}" in index.text
    case = next(page for path, page in _pages(site).items() if path.parent.name == "cases")
    assert case.one("h1").text == EVIL
    assert EVIL in case.one("dl", "failures").text


def test_embedded_data_stays_data(site: Path) -> None:
    for page in _pages(site).values():
        for script in page.all("script"):
            if "src" not in script.attributes:
                json.loads(script.text)
    assert "</script" not in json_script({"x": "</script><script>"})
    assert json.loads(json_script({"x": EVIL + "\u2028"})) == {"x": EVIL + "\u2028"}


def test_file_names_stay_in_their_folder(site: Path) -> None:
    assert [path.name for path in (site / "cases").iterdir()] == ["a-..-b-i--x-..-b.html"]
    manifest = json.loads((site / "manifest.json").read_text())
    assert all((site / name).resolve().is_relative_to(site.resolve()) for name in manifest["files"])


def test_csv_fields_are_quoted() -> None:
    assert csv_text(("a", "b"), [('x,"y"', "line\nbreak")]) == 'a,b\n"x,""y""","line\nbreak"\n'
