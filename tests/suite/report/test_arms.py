"""How runs become arms: what the claims compare, under which conditions, against which baseline."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_up_site import Built

from suite.declare import expand, load_case
from suite.report.arms import Layout, make_layout
from suite.report.look import looks, slots

CASE = """
question: Which?
base: {model: llama-0.3m, tokens: 10k, precision: bf16}
matrix:
  precision: [bf16, fp8-delayed, fp8-current]
  ageing: [none, static-16]
  seed: [0, 1]
include:
  - {optimizer.weight_decay: [0, 1], seed: 0}
claims:
  - {id: a, measure: final_loss_gap, of: {precision: fp8-delayed, ageing: none}, against: {precision: bf16, ageing: none}, expect: {below: 1}}
  - {id: b, measure: final_loss_gap, of: {precision: fp8-current, ageing: none}, against: {precision: bf16, ageing: none}, expect: {below: 1}}
  - {id: c, measure: final_loss_gap, of: {precision: fp8-current, ageing: static-16}, against: {precision: fp8-delayed, ageing: static-16}, expect: {below: 1}}
  - {id: d, measure: final_loss_gap, of: {precision: bf16, ageing: static-16}, against: {precision: bf16, ageing: none}, expect: {below: 1}}
"""  # noqa: E501


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    path = tmp_path / "which.yaml"
    path.write_text(CASE)
    return make_layout(expand(load_case(path)))


def test_an_axis_that_claims_mostly_hold_equal_is_a_condition(layout: Layout) -> None:
    assert layout.compared_axes == ("precision",)
    assert layout.reference == {"precision": "bf16"}
    assert set(layout.condition_axes) == {"ageing", "optimizer.weight_decay"}


def test_arms_hold_all_seeds_and_find_their_baseline(layout: Layout) -> None:
    arms = {(arm.panel, arm.name): arm for arm in layout.arms}
    delayed = arms["static-16", "fp8-delayed"]
    assert sorted(delayed.by_seed) == [0, 1]
    assert delayed.baseline is arms["static-16", "bf16"]
    assert arms["static-16", "bf16"].baseline is None
    assert delayed.baseline.look.color == 0
    assert arms["ageing none", "fp8-delayed"].look == delayed.look


def test_panels_keep_the_order_of_the_matrix(layout: Layout) -> None:
    assert layout.panels[:2] == ("ageing none", "static-16")
    assert [arm.panel for arm in layout.arms] == sorted(
        (a.panel for a in layout.arms), key=layout.panels.index
    )


def test_bases_stand_apart(built: Built) -> None:
    layout = make_layout(built.plan)
    assert [run.role for run in layout.bases] == ["base"]
    assert len(layout.keys) == len(set(layout.keys)) == len(built.plan.runs)


def test_a_label_keeps_its_colour_when_others_come_and_go() -> None:
    few, many = slots(["fp8-delayed", "fp8-current"], 6), slots(["fp8-delayed", "fp8-current", "zz"], 6)
    assert {name: many[name] for name in few} == few
    assert len(set(slots([f"arm {n}" for n in range(6)], 6).values())) == 6
    assert set(slots([f"arm {n}" for n in range(20)], 6).values()) <= set(range(6))


def test_arms_differ_in_more_than_colour() -> None:
    pairs = [(precision, ffn) for precision in ("bf16", "fp8") for ffn in ("swiglu", "smooth", "gelu")]
    chosen = looks(pairs, ("bf16", "swiglu"))
    assert len({(look.color, look.dash, look.marker) for look in chosen.values()}) == len(pairs)
    assert chosen["bf16", "swiglu"].color == 0
    assert chosen["bf16", "swiglu"].dash == ""
    assert chosen["fp8", "smooth"].dash == chosen["bf16", "smooth"].dash != ""
