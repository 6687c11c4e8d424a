"""One step's memory and collectives by formula, trace and measurement: what the tables say of them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from harness.ledger.step import Category, Collective, RankStep, record
from suite.declare import Plan, expand, load_case
from suite.report.reconcile import reconciliation
from suite.report.run_page import _ranks
from suite.report.volumes import volume_section

CASE = """\
question: Who is right?
task: step
base: {model: llama-0.3m, precision: fp32, batch_size: 4, seq_len: 32}
matrix:
  task: [step, trace, ledger]
  parallelism: [ddp-2, zero3-2]
"""
PEAK: dict[Category, int] = {
    "weights": 400,
    "gradients": 400,
    "optimizer": 800,
    "activations": 300,
    "temporary": 100,
}


class FakeEvidence:
    """A journal of each run: the formula has 20 bytes less of temporary tensors and one collective too few."""

    def __init__(self, plan: Plan, *, failed: Iterable[str] = ()) -> None:
        self._curves: dict[tuple[str, str], dict[str, list[tuple[int, float]]]] = {}
        self._failed = {run.key for run in plan.runs if run.spec.task in set(failed)}
        for run in plan.runs:
            self._key = run.key
            formula = run.spec.task == "ledger"
            collectives = [
                Collective("dp", "all_reduce", 2 - formula, 400, 2),
                Collective("control", "all_reduce", 1, 4, 2),
            ]
            ranks = [
                RankStep(
                    rank=rank,
                    peak={**PEAK, "temporary": 100 - 20 * formula - rank},
                    moment="backward",
                    state={"weights": 400, "gradients": 400, "optimizer": 800},
                    saved=300,
                    collectives=tuple(collectives),
                )
                for rank in (0, 1)
            ]
            record(self, ranks, step=5 if run.spec.task == "step" else 1)
            if run.spec.task == "step":
                self.measure(5, {"peak_bytes": 2100}, "allocator.allocated")

    def measure(self, step: int, values: dict[str, float], scope: str = "") -> None:
        for metric, value in values.items():
            self._curves.setdefault((metric, self._key), {}).setdefault(scope, []).append((step, value))

    def status(self, key: str) -> str:
        return "crashed" if key in self._failed else "ok"

    def points(self, keys: Iterable[str], *metrics: str) -> FakeEvidence:
        self._asked = set(keys)
        return self

    def scopes(self, metric: str, key: str) -> dict[str, list[tuple[int, float]]]:
        return self._curves.get((metric, key), {}) if key in self._asked else {}


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    path = tmp_path / "case.yaml"
    path.write_text(CASE)
    return expand(load_case(path))


def test_rows_hold_each_source_and_what_it_misses(plan: Plan) -> None:
    view = reconciliation(plan, FakeEvidence(plan))  # type: ignore[arg-type]
    assert view.columns == (("formula", "predicted"), ("trace", "simulated"), ("measured", "native"))
    assert [one.name for one in view.configurations] == ["ddp-2", "zero3-2"]
    rows = {(row.group, row.name): row for row in view.configurations[0].rows}
    total = rows["at the peak", "total"]
    assert total.is_total and total.exact_amounts == ("1,980 bytes", "2,000 bytes", "2,000 bytes")
    assert [each.text for each in total.differences] == [
        "−20\N{NO-BREAK SPACE}B (−1.0\N{NO-BREAK SPACE}%)",
        "exact",
    ]
    assert rows["between steps", "optimizer"].differences[0].is_exact
    assert rows["at the peak", "allocator.allocated"].amounts[:2] == ("–", "–")
    assert view.configurations[0].residue == "mostly temporary"
    assert any(
        "formula and measurement differ by at most 1.0\N{NO-BREAK SPACE}%" in text for text in view.sentences
    )
    assert any("trace and measurement differ not at all" in text for text in view.sentences)
    assert view.sentences[-1].endswith("to the byte, in 2 of 2 configurations.")


def test_differences_of_categories_add_up_to_the_totals(plan: Plan) -> None:
    view = reconciliation(plan, FakeEvidence(plan))  # type: ignore[arg-type]
    rows = [row for row in view.configurations[0].rows if row.group == "at the peak" and "." not in row.name]
    parts = [
        [int(amount.removesuffix(" bytes").replace(",", "")) for amount in row.exact_amounts] for row in rows
    ]
    assert [sum(each) for each in zip(*parts[:-1], strict=True)] == parts[-1]


def test_without_a_measurement_the_trace_is_the_reference(plan: Plan) -> None:
    view = reconciliation(plan, FakeEvidence(plan, failed=["step"]))  # type: ignore[arg-type]
    assert view.reference == "trace" and view.compared == ("formula",)
    assert any("formula and trace" in text for text in view.sentences)


def test_one_source_alone_is_no_table(plan: Plan) -> None:
    assert not reconciliation(plan, FakeEvidence(plan, failed=["step", "trace"])).configurations  # type: ignore[arg-type]


def test_collectives_that_differ_are_said_to(plan: Plan) -> None:
    view = volume_section(plan, FakeEvidence(plan))  # type: ignore[arg-type]
    (row,) = view.groups[0].rows  # what is reduced for the record alone is left out
    assert row.operation == "dp.all_reduce" and row.agrees == "calls differ"
    assert [cell.count for cell in row.cells] == ["1", "2", "2"]
    assert view.sentence == "Calls and bytes agree in 0 of 2 operations of 2 configurations."
    alone = volume_section(plan, FakeEvidence(plan, failed=["ledger"]))  # type: ignore[arg-type]
    assert alone.groups[0].rows[0].agrees == "equal"


def test_a_runs_page_sets_its_ranks_side_by_side(plan: Plan) -> None:
    evidence = FakeEvidence(plan)
    key = plan.runs[0].key
    evidence.points([key])
    table = _ranks(evidence, key)  # type: ignore[arg-type]
    assert table is not None and table.ranks == (0, 1) and not table.num_left_out
    rows = dict(table.rows)
    assert rows["peak_bytes[temporary]"] == ("100\N{NO-BREAK SPACE}B", "99\N{NO-BREAK SPACE}B")
    assert rows["comm_count[control.all_reduce]"] == ("1", "1")
    assert "peak_bytes[communication]" not in rows, "nothing but zeros"
