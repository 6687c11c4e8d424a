"""The drawing that explains tied rounding: its numbers are rounded, not written."""

from __future__ import annotations

import re
import statistics

import pytest
from markupsafe import Markup

from suite.report.explanations import explanation
from suite.report.tie_rounding import BELOW_ONE, REMAINDER, bf16, errors, sums, ulp


def test_rounding_is_bf16s() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    import numpy as np

    x = np.random.default_rng(0).standard_normal(2000).astype(np.float32)
    x = np.concatenate([x, np.float32([1 + 2**-8, 1 + 3 * 2**-8, -4.703125, 0.0])])
    assert [bf16(float(v)) for v in x] == x.astype(ml_dtypes.bfloat16).astype(float).tolist()
    assert ulp(-4.7) == 2.0**-5 and ulp(1.0) == 2.0**-7 and ulp(0.99) == 2.0**-8


def test_the_papers_example_comes_out() -> None:
    alone, papers, even, below = sums()
    assert papers.exact == pytest.approx(-4.70399) and papers.stored == -4.71875
    assert papers.stored - papers.exact == pytest.approx(-0.01476, abs=1e-8)
    assert (alone.exact, alone.stored) == (-4.703125, -4.6875), "a tie, to even"
    assert even.stored == -4.6875 and 0 < even.error < 0.05
    assert below.weight < 1 and abs(below.error) < 0.5


def test_ties_lean_one_way_only_with_something_small() -> None:
    assert statistics.fmean(errors(1.0, 0.0)) == 0
    assert sorted(set(errors(1.0, 0.0))) == [-0.5, 0.0, 0.5]
    pushed = errors(1.0, REMAINDER)
    assert max(pushed) < 0.05 and statistics.fmean(pushed) == pytest.approx(-0.222, abs=0.001)
    assert len({round(error, 6) for error in pushed}) == 2
    filled = errors(bf16(BELOW_ONE), REMAINDER)
    assert abs(statistics.fmean(filled)) < 0.02 and len(set(filled)) > 100


def test_the_drawing_is_one_figure_of_this_case_alone() -> None:
    drawing = explanation("flash_attention_bias")
    assert isinstance(drawing, Markup) and explanation("fp8_long_horizon") == ""
    assert drawing.count("<figure") == 1 and drawing.count('role="img"') == 7
    labels = re.findall(r'role="img" aria-label="([^"]+)"', drawing)
    assert any("−4.70399 is stored as −4.71875" in label for label in labels)
    assert any("mean −0.22" in label for label in labels)
    assert "nan" not in drawing.lower().replace("nano", "")
    assert not re.findall(r"(?:x|x1|cx)=\"-\d", drawing), "nothing is drawn outside its plot"
