"""Figures and tables of a case: what they take from the runs, and that each number is where it is said to be."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import pytest

from suite.declare import Plan, expand, load_case
from suite.report.figures import FigureView, figure_views, table_views
from suite.report.look import NUM_COLORS, looks
from suite.report.plots import Dot, Line, line_plot, scale_of
from suite.report.scale import LogScale, linear, logarithmic

CASE = """\
question: What does a cast keep?
task: tensors
matrix:
  cast: [e4m3:current, "mxfp8:up"]
  tensor.outliers: [isolated, tokens]
  tensor.outlier_sigmas: [0, 1k, 100k]
  seed: [0, 1, 2]
figures:
  - {title: Noise <b>, measure: "quant_sqnr_db[bulk]", x: tensor.outlier_sigmas, lines: cast, log_x: true, why: So.}
  - {title: Casts, measure: "quant_sqnr_db[bulk]", x: cast, lines: tensor.outliers, where: {tensor.outlier_sigmas: 1k}}
  - {title: Steps, measure: "quant_sqnr_db[bulk]", x: step, where: {cast: "mxfp8:up"}}
  - {title: Nothing, measure: "format_max", x: cast}
tables:
  - {title: All, rows: cast, columns: ["quant_sqnr_db[bulk]", "quant_flushed_fraction[bulk]"]}
"""


class FakeEvidence:
    """Answers what a figure asks: each run's SQNR is 30, less its seed, less two for the second cast."""

    def __init__(self, plan: Plan, *, failed: Iterable[str] = ()) -> None:
        self._specs = {run.key: run.spec for run in plan.runs}
        self._failed = set(failed)

    def status(self, key: str) -> str:
        return "crashed" if key in self._failed else "ok"

    def points(self, keys: Iterable[str], *metrics: str) -> FakeEvidence:
        return self

    def triples(self, metric: str, key: str) -> list[tuple[str, int, float]]:
        if metric != "quant_sqnr_db":
            return []
        spec = self._specs[key]
        base = 30.0 - spec.seed - 2 * (spec.cast == "mxfp8:up") - math.log10(spec.tensor.outlier_sigmas + 1)
        return [("bulk", 1, base), ("bulk", 2, base - 4), ("outliers", 1, -99.0)]


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    path = tmp_path / "case.yaml"
    path.write_text(CASE)
    return expand(load_case(path))


def views(plan: Plan, **kwargs: object) -> tuple[FigureView, ...]:
    return figure_views(plan, FakeEvidence(plan, **kwargs))  # type: ignore[arg-type]


def test_means_and_intervals_over_seeds(plan: Plan) -> None:
    noise, casts, steps = views(plan)  # the figure without any value is left out
    assert noise.header == ("tensor.outlier_sigmas", "e4m3:current", "mxfp8:up")
    # seeds 0, 1, 2 give 28, 27, 26 (the mean of both steps): 27 and t(0.975, 2) / sqrt(3) around it
    assert noise.rows[0] == ("0", "27.00 [24.5, 29.5]", "25.00 [22.5, 27.5]")
    assert [row[0] for row in noise.rows] == ["0", "1000", "100000"]
    assert noise.num_seeds == 3
    assert casts.header == ("cast", "isolated", "tokens")
    assert casts.rows[0][1] == casts.rows[0][2] == "24.00 [21.5, 26.5]"
    assert [name for name, _ in casts.strips] == ["e4m3:current", "mxfp8:up"]
    assert not casts.plot and noise.plot and not noise.strips
    assert [row[0] for row in steps.rows] == ["1", "2"]


def test_labels_left_open_are_averaged_within_a_seed(plan: Plan) -> None:
    """Two kinds of outliers and three magnitudes a seed are still three values, not eighteen."""
    assert views(plan)[2].num_seeds == 3
    mean = 28 - 1 - (0 + math.log10(1001) + math.log10(100001)) / 3
    assert views(plan)[2].rows[0][1].startswith(f"{mean:.2f} ")


def test_runs_that_failed_are_left_out(plan: Plan) -> None:
    failed = [run.key for run in plan.runs if run.spec.seed > 0]
    noise = views(plan, failed=failed)[0]
    assert noise.rows[0] == ("0", "28.00", "26.00")
    assert noise.num_seeds == 1
    assert views(plan, failed=[run.key for run in plan.runs]) == ()


def test_text_is_escaped_and_the_drawing_says_what_it_shows(plan: Plan) -> None:
    noise = views(plan)[0]
    assert 'role="img"' in noise.plot and "<b>" not in noise.plot
    assert "lowest" in noise.summary and "quant_sqnr_db[bulk], dB" in noise.summary
    assert noise.plot.count("data-") == 0
    assert noise.why == "So."


def test_a_table_has_a_row_for_each_value(plan: Plan) -> None:
    (table,) = table_views(plan, FakeEvidence(plan))  # type: ignore[arg-type]
    assert [name for name, _ in table.header] == ["sqnr db[bulk]", "flushed fraction[bulk]"]
    assert [row[0] for row in table.rows] == ["e4m3:current", "mxfp8:up"]
    assert table.rows[0][2] == "–"


def test_a_logarithmic_axis_keeps_a_place_for_zero() -> None:
    scale = logarithmic([0.0, 1e-5, 0.1])
    assert scale.has_zero and scale.at(0) == 0 < scale.at(1e-5) < scale.at(1e-3) < scale.at(0.1) < 1.001
    assert scale.ticks(5)[0] == 0 and scale.text(0) == "0"
    assert not logarithmic([1.0, 10.0]).has_zero
    assert all(0 <= scale.at(tick) <= 1 for tick in scale.ticks(5))
    assert len(LogScale(1e-38, 1e38).ticks(5)) <= 6
    assert [tick for tick in logarithmic([1.0, 16.0]).ticks() if tick <= 10] == [1, 2, 5, 10]
    assert logarithmic([]).low > 0
    assert logarithmic([3.0]).low < 3 < logarithmic([3.0]).high


def test_ticks_of_tiny_values_differ() -> None:
    ticks = linear([0.0, 1.2e-38]).ticks()
    assert len(ticks) == len(set(ticks)) > 2
    assert linear([0.0, 0.7]).ticks() == [0, 0.2, 0.4, 0.6]


def test_no_two_colours_share_a_dash_or_a_marker() -> None:
    found = looks([(f"arm {number}",) for number in range(NUM_COLORS)])
    for part in ("color", "dash", "marker"):
        assert len({getattr(look, part) for look in found.values()}) == NUM_COLORS
    many = looks([(f"arm {number}",) for number in range(2 * NUM_COLORS)])
    assert len(set(many.values())) == 2 * NUM_COLORS


def test_every_dot_is_drawn() -> None:
    look = looks([("a",)])[("a",)]
    line = Line("a", look, tuple(Dot(x, float(x), x - 20.0, x + 20.0) for x in (1, 10, 100)))
    plot = line_plot([line], scale_of(line.dots, logarithmic=False), log_x=True, label="l")
    assert plot.count("dot") == 3
    assert plot.count("error") == 3


def test_an_arm_without_the_first_axis_has_a_colour_of_its_own() -> None:
    found = looks([("a", ""), ("", "x"), ("", "y")], ("a", "x"))
    assert found[("a", "")].color == found[("", "x")].color == 0
    assert found[("", "y")].color != 0
