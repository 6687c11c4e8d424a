"""The page of kernel benchmarks, and the projection of products to whole models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from html_pages import Element, read_page
from made_up_site import ENVIRONMENT, request_of

from harness.ledger.amdahl import flop_share, gemm_speedup, layer_gemms, share_needed
from results.journal import JournalWriter
from results.store import Store
from suite.declare import Plan, expand, load_case
from suite.declare.presets import presets
from suite.report import build_site
from suite.report.evidence import Evidence
from suite.report.kernels import kernels_page
from suite.report.projection import projection_section

RATIOS = {"cpp": 1.2, "torch": 40.0}


def session(when: str, factor: float = 1.0, node: str = "node1") -> dict[str, Any]:
    """A session of casts by two implementations, and one benchmark without a copy beside it."""
    entries = [
        {
            "name": f"test_cast[{name}]",
            "fullname": f"tests/benchmarks/test_cast.py::test_cast[{name}]",
            "extra_info": {
                "ratio_to_copy": ratio * factor, "format": "mxfp8", "implementation": name, "dtype": "float32",
                "elements": 1048576,
            },
            "stats": {"median": 0.00125, "rounds": 5},
        }
        for name, ratio in RATIOS.items()
    ]  # fmt: skip
    entries.append(
        {
            "name": "test_<step>",
            "fullname": "tests/benchmarks/test_step.py::test_<step>",
            "extra_info": {"speed_ratio": 1.25},
            "stats": {"median": 2.5},
        }
    )
    machine = {"node": node, "system": "Linux", "cpu": {"brand_raw": f"EPYC of {node}", "count": 2}}
    return {"machine_info": machine, "commit_info": {"id": "abc"}, "datetime": when, "benchmarks": entries}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path / "suite.duckdb")
    for number, made in enumerate(
        [
            session("2026-11-29T10:00:00+00:00"),
            session("2026-11-30T10:00:00+00:00", 1.5),
            session("2026-11-30T11:00:00+00:00", node="node2"),
        ]
    ):
        path = tmp_path / f"{number}.json"
        path.write_text(json.dumps(made))
        store.ingest_benchmarks(path)
    return store


@pytest.fixture
def page(store: Store, tmp_path: Path) -> Element:
    index = build_site(tmp_path, store, [])
    links = [link.attributes["href"] for link in read_page(index).all("a")]
    assert "kernels.html" in links
    return read_page(index.parent / "kernels.html")


def test_newest_ratios_lead_with_what_they_are_of(page: Element) -> None:
    first, second = page.all("table", "kernels")
    rows = [[cell.text for cell in row.children] for row in first.one("tbody").all("tr")]
    assert [row[:5] for row in rows] == [
        ["mxfp8cast", "1.80", "cpp", "float32", "1.05M"],
        ["mxfp8cast", "60.0", "torch", "float32", "1.05M"],
    ]
    assert [row[6] for row in rows] == ["1.25 ms"] * 2
    assert [row[-1] for row in rows] == ["+50%"] * 2  # against the session before
    assert second.one("tbody").all("tr")[0].text.startswith("mxfp8")
    assert len(second.all("svg", "spark")) == 0  # one session has no history


def test_drawings_say_what_they_show(page: Element) -> None:
    strips = page.all("svg", "strip")
    labels = [strip.attributes["aria-label"] for strip in strips if "aria-label" in strip.attributes]
    assert "mxfp8, cpp, float32, 1.05M: 1.80 copies" in labels
    sparks = [spark.attributes["aria-label"] for spark in page.all("svg", "spark")]
    assert "mxfp8, torch, float32, 1.05M, from session to session: 40.0, 60.0 copies" in sparks


def test_other_benchmarks_and_hostile_names(page: Element) -> None:
    assert "<step>" in page.text and "speed ratio 1.25" in page.text
    assert not page.all("step")


def test_each_machine_has_its_sessions(page: Element) -> None:
    headings = [heading.text for heading in page.all("h2")]
    assert headings == ["EPYC of node1 2 cores", "EPYC of node2 2 cores", "Make these numbers again"]
    assert [len(details.all("tr")) - 1 for details in page.all("details")] == [2, 1]
    assert "abc" in page.all("details")[0].text


def test_the_data_behind_the_page(page: Element, tmp_path: Path) -> None:
    data = json.loads((tmp_path / "site" / "data" / "kernels.json").read_text())
    first = data["machines"][0]["sessions"][0]["benchmarks"][0]
    assert first["ratio_to_copy"] == RATIOS["cpp"] and first["benchmark_median_s"] == 0.00125


def test_no_page_without_benchmarks(tmp_path: Path) -> None:
    store = Store(tmp_path / "suite.duckdb")
    store.save_verdicts([])
    assert kernels_page(store) is None
    index = build_site(tmp_path, store, [])
    assert not (index.parent / "kernels.html").exists()
    assert "kernels.html" not in index.read_text()


# The projection


def timed(out: Path, plan: Plan, rates: dict[str, float]) -> Store:
    """All products of a plan, each kernel at one rate."""
    store = Store(out / "suite.duckdb")
    for run in plan.runs:
        if run.spec.task != "gemm":
            continue
        folder = out / "journals" / run.key / "1"
        folder.mkdir(parents=True)
        (folder / "run.json").write_text(json.dumps(request_of(run, plan)))
        journal = JournalWriter(folder / "rank0.journal")
        journal.start(ENVIRONMENT)
        for step in (1, 2, 3):
            journal.measure(step, {"gemm_with_cast_tflops": rates[run.spec.gemm.kernel]})
        journal.end("ok")
        journal.close()
        store.ingest(folder)
    return store


def test_without_a_gpu_published_products_stand_in(tmp_path: Path) -> None:
    plan = expand(load_case("fp8_throughput"), "laptop")
    store = Store(tmp_path / "suite.duckdb")
    store.save_verdicts([])
    view = projection_section(plan, Evidence(store, [run.key for run in plan.runs]))
    assert view is not None and view.num_measured == 0
    shown = {(row.model, row.source): row for row in view.rows}
    assert len(shown) == len(view.rows) == 3 * 2
    row = shown["llama3-8b", "te2026, operands cast before"]
    assert (row.published, row.gemm_speedup, row.needed) == ("1.30", "1.90", "49%")
    assert shown["llama3-405b", "te2026, operands cast before"].needed == "73%"
    assert row.possible == f"{flop_share(presets('models')['llama3-8b'], 8192):.0%}"
    assert "No FP8 product was timed here" in view.notes[0]


def test_timed_products_are_projected(tmp_path: Path) -> None:
    plan = expand(load_case("fp8_throughput"), "gpu")
    rates = {"bf16": 600.0, "fp8-tensorwise": 900.0, "fp8-rowwise": 540.0, "fp8-block": 840.0}
    store = timed(tmp_path, plan, rates)
    view = projection_section(plan, Evidence(store, [run.key for run in plan.runs]))
    assert view is not None and view.num_measured == 3
    rows = {(row.model, row.source.partition(",")[0]): row for row in view.rows if row.fidelity == "native"}
    fast = rows["llama3-8b", "fp8-tensorwise"]
    assert fast.gemm_speedup == "1.50" and fast.needed == f"{share_needed(1.3, 1.5):.0%}"
    too_slow = rows["llama3-405b", "fp8-block"]
    assert "more than all of it" in too_slow.verdict and too_slow.needed == "121%"
    slower = rows["llama3-8b", "fp8-rowwise"]
    assert slower.needed == "\N{EN DASH}" and "no faster than BF16" in slower.verdict
    model = presets("models")["llama3-8b"]
    shape = (16384, 4096, 4096)
    found = gemm_speedup(layer_gemms(model, 16384), {shape: 600.0}, {shape: 900.0})
    assert found is not None and found.value == pytest.approx(1.5)


def test_cases_without_products_have_no_projection(tmp_path: Path) -> None:
    plan = expand(load_case("fp8_long_horizon"), "laptop")
    assert projection_section(plan, Evidence(Store(tmp_path / "s.duckdb"), [])) is None
