"""What stands on the pages of a site with every kind of outcome in it."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from html_pages import Element, read_page
from made_up_site import Built

WORDS = ("reproduced", "direction reproduced", "differs", "inconclusive", "not comparable", "not run")


@pytest.fixture(scope="module")
def index(built: Built) -> Element:
    return read_page(built.index)


@pytest.fixture(scope="module")
def case(built: Built) -> Element:
    return read_page(built.case)


def test_index_shows_every_claim_with_its_verdict_in_words_and_shape(built: Built, index: Element) -> None:
    verdicts = {row["claim_id"]: row for row in built.store.verdicts()}
    assert len(verdicts) == len(built.plan.case.claims)
    shown = index.all("li", "claim")
    assert len(shown) == len(verdicts)
    for claim in built.plan.case.claims:
        (element,) = [
            e for e in shown if e.one("h3").one("a").attributes["href"].endswith(f"#claim-{claim.id}")
        ]
        badge = element.one(cls="verdict").one("span", "badge")
        assert badge.text == verdicts[claim.id]["verdict"]
        assert badge.text in WORDS
        assert len(badge.all("svg", "mark")) == 1
        assert verdicts[claim.id]["reason"] in element.text
        assert "size laptop" in element.text


def test_a_claim_that_no_paper_makes_is_listed_under_none(built: Built, index: Element) -> None:
    quoted = {claim.id for claim in built.plan.case.claims if claim.paper is not None}
    own = {claim.id for claim in built.plan.case.claims} - quoted
    assert quoted and own
    sections = {
        section.one("h2").text: {
            item.one("h3").one("a").attributes["href"].partition("#claim-")[2]
            for item in section.all("li", "claim")
        }
        for section in index.all("section")
        if section.all("li", "claim")
    }
    assert sections.pop("Expectations of our own") == own
    assert set().union(*sections.values()) == quoted
    assert f"{len(quoted)} of 1 paper and {len(own)} of our own" in index.one("p", "lead").text


def test_every_kind_of_verdict_of_the_case_is_counted(built: Built, index: Element) -> None:
    counts = Counter(row["verdict"] for row in built.store.verdicts())
    tally = index.one("ul", "tally")
    assert {item.one("span", "badge").text: int(item.one("b").text) for item in tally.all("li")} == counts


def test_judged_claims_show_fidelity_interval_and_rule(built: Built, index: Element) -> None:
    for row in built.store.verdicts():
        (element,) = [e for e in index.all("li", "claim") if row["reason"] in e.text]
        assert "rule: " in element.one(cls="rule-line").text
        if row["fidelity"]:
            assert row["fidelity"] in element.one("ul", "basis").text
        if row["effect"] is not None:
            strip = element.all("svg", "strip")[0]
            assert strip.attributes["role"] == "img"
            assert "interval" in strip.attributes["aria-label"]
            assert len(strip.all("circle", "seed")) == row["num_pairs"]


def test_case_page_has_its_sections_in_order(case: Element) -> None:
    ids = [heading.attributes["id"] for heading in case.all("h2")]
    assert ids == ["verdicts", "setting", "gaps", "curves", "health", "memory", "outcomes", "costs", "again"]
    linked = [link.attributes["href"] for link in case.one("nav", "contents").all("a")]
    assert linked == [f"#{name}" for name in ids]


def test_paper_and_runs_stand_side_by_side_with_provenance(case: Element) -> None:
    table = _section(case, "setting").all("table")[0].one("tbody")
    rows = {row.one("th").text: [cell.text for cell in row.all("td")] for row in table.all("tr")}
    assert rows["hardware"] == ["256 Gaudi2", "AMD EPYC 2 cores"]
    assert rows["tokens"][0] == "2T"
    assert rows["fidelity"][1] == "27 native and 54 emulated runs"
    assert {"read", "secondary"} <= {mark.text for mark in case.all("span", "provenance")}
    claim = case.by_id("claim-aged-fp8-breaks")
    assert "The paper does not state: length of the amax history." in claim.text
    assert "Why this rule: a gap of 0.05 nats" in claim.text


def test_every_arm_has_an_interval_row_and_every_seed_a_dot(built: Built, case: Element) -> None:
    table = case.one("table", "forest")
    rows = [row for body in table.all("tbody") for row in body.all("tr") if "group" not in row.classes]
    assert len(rows) == 8 * 3  # nine arms under three conditions; bf16 with plain SwiGLU is the baseline
    for row in rows:
        num_seeds = int(row.all("td")[-1].text)
        assert num_seeds >= 1
        diverged = "diverged" in row.one("th").text
        assert len(row.all("circle", "seed")) == num_seeds - diverged
    assert [row.one("th").text for row in table.all("tr", "group")] == [
        "ageing none",
        "static-16",
        "sporadic-16",
    ]


def test_failures_are_cells_with_their_reason(built: Built, case: Element, index: Element) -> None:
    outcomes = _section(case, "outcomes")
    cells = [cell for table in outcomes.all("table", "matrix") for cell in table.all("td", "run")]
    assert len(cells) == 81
    statuses = Counter(name for cell in cells for name in cell.classes if name.startswith("st-"))
    assert statuses == {
        "st-ok": 76,
        "st-oom": 1,
        "st-diverged": 1,
        "st-hung": 1,
        "st-skipped": 1,
        "st-not-run": 1,
    }
    for reason in (
        "loss is NaN at step 31",
        "allocating 2.1 GiB failed",
        "no sign of life",
        "needs more memory",
    ):
        assert reason in outcomes.one("dl", "failures").text
        assert reason in index.text


def test_emulated_speed_is_never_shown_as_speed(built: Built, case: Element) -> None:
    native = {run.key: run.spec.fidelity == "native" for run in built.plan.runs}
    speed = case.all(cls="scroll")
    (table,) = [e for e in speed if e.attributes["aria-label"] == "Speed of native runs"]
    assert {row.one("th").text.split()[0] for row in table.one("tbody").all("tr")} == {"bf16"}
    (table,) = [e for e in speed if e.attributes["aria-label"] == "Cost of emulation"]
    assert "Tokens/s" not in table.text
    arms = {row.one("th").text.split()[0] for row in table.one("tbody").all("tr")}
    assert arms == {"fp8-delayed", "fp8-current"}
    for path in (built.site / "runs").glob("*.html"):
        text = read_page(path).text
        recorded = "Nothing was recorded" not in text
        assert ("tokens_per_s" in text) == (native[path.stem] and recorded)
        assert ("Cost of emulation" in text) == (not native[path.stem] and recorded)


def test_missing_values_show_their_reason(case: Element) -> None:
    assert "the peak of this CPU is not known" in _section(case, "costs").text
    assert "runs go side by side, one thread each" in _section(case, "costs").text


def test_memory_and_heat_maps_carry_numbers_not_colour_alone(case: Element) -> None:
    memory = _section(case, "memory")
    assert "21.0 MiB" in memory.text
    assert all("most of it activations" in bar.attributes["aria-label"] for bar in memory.all("svg", "bar"))
    maps = case.all("figure", "heat")
    assert len(maps) == 6
    shades = {f"h{level}" for level in range(7)}
    cells = [cell for cell in maps[0].all("td") if cell.classes & shades]
    assert cells
    assert all(cell.text for cell in cells)
    assert "Worst: " in maps[0].text


def test_charts_are_complete_without_scripts(case: Element) -> None:
    figures = case.all("figure", "chart")
    assert len(figures) >= 12
    for figure in figures:
        plot = figure.one("svg", "plot")
        assert plot.attributes["role"] == "img"
        assert len(plot.attributes["aria-label"]) > 40
        drawn = [path for path in plot.all("path", "series") if path.attributes["d"]]
        data = json.loads(figure.one("script").text)
        assert [path.attributes["data-series"] for path in drawn] == [
            line["label"] for line in data["series"]
        ]
        assert len(data["x"]) <= 2000
        table = figure.one("table")
        assert len(table.one("thead").all("th")) == 1 + len(drawn)
        assert 2 <= len(table.one("tbody").all("tr")) <= 16
        assert figure.all("figcaption")


def test_a_diverged_seed_is_drawn_apart(case: Element) -> None:
    data = [json.loads(figure.one("script").text) for figure in case.all("figure", "chart")]
    labels = [line["label"] for chart in data for line in chart["series"]]
    assert "fp8-delayed · swiglu, seed 2 diverged" in labels
    assert "seed 2 (diverged after step 20)" in case.text


def test_run_pages_say_how_it_ran_and_how_to_make_it_again(built: Built) -> None:
    labels = {"precision": "fp8-delayed", "model.ffn": "swiglu", "ageing": "none", "seed": 1}
    (arm,) = built.plan.select(labels)
    page = read_page(built.site / "runs" / f"{arm.key}.html")
    assert page.one(cls="command").one("code").text == (
        "suite run fp8_long_horizon_demo --size laptop --only=precision=fp8-delayed --only=model.ffn=swiglu "
        "--only=ageing=none --only=seed=1"
    )
    assert "precision.recipe.activations.format" in page.text
    assert "AMD EPYC 7763" in page.text
    assert arm.depends_on is not None
    assert f"{arm.depends_on}.html" in [link.attributes.get("href") for link in page.all("a")]
    assert f"journals/{arm.key}/1/" in page.text
    diverged = next(row for row in built.store.runs() if row.status == "diverged")
    warning = read_page(built.site / "runs" / f"{diverged.key}.html").all("p", "warn")[0]
    assert warning.text == "diverged: loss is NaN at step 31"


def test_links_stay_inside_the_folder_and_nothing_is_loaded_from_elsewhere(built: Built) -> None:
    pages = [built.index, built.case, *sorted((built.site / "runs").glob("*.html"))[:12]]
    ids = {
        path: {e.attributes["id"] for e in read_page(path).all() if "id" in e.attributes} for path in pages
    }
    for path in pages:
        page = read_page(path)
        names = [e.attributes["id"] for e in page.all() if "id" in e.attributes]
        assert len(names) == len(set(names)), f"an id is used twice in {path.name}"
        policy = next(m for m in page.all("meta") if "http-equiv" in m.attributes)
        assert policy.attributes["content"] == "default-src 'self' 'unsafe-inline'"
        for element in page.all():
            for name in ("href", "src"):
                if name in element.attributes:
                    _check_link(element, element.attributes[name], path, built.site, ids)
        assert not [e for e in page.all() if "style" in e.attributes or "srcset" in e.attributes]
    for path in (built.site / "static").rglob("*.css"):
        assert not re.search(r"url\(|@import", path.read_text()), path.name


def _check_link(element: Element, link: str, page: Path, site: Path, ids: dict[Path, set[str]]) -> None:
    parts = urlsplit(link)
    if parts.scheme:
        # A paper's address is followed by a click alone.
        assert element.tag == "a", link
        assert "external" in element.attributes["rel"]
        return
    target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
    assert target.is_file(), f"{page.name} links to {link}, which is not there"
    assert target.is_relative_to(site.resolve())
    if parts.fragment:
        assert parts.fragment in ids[next(path for path in ids if path.resolve() == target)], link


def _section(page: Element, heading: str) -> Element:
    section = page.by_id(heading).parent
    assert section is not None
    return section
