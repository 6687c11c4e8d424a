"""The task that looks at an accumulator alone."""

from __future__ import annotations

import pytest

from harness.spec import AccumulationSpec, GemmSpec, PrecisionSpec, QuantizerSpec, RecipeSpec, RunSpec

from .conftest import Runs

E4M3 = QuantizerSpec(format="e4m3")


def product(accumulation: AccumulationSpec | None, k: int = 512) -> RunSpec:
    recipe = RecipeSpec(activations=E4M3, weights=E4M3, accumulation=accumulation)
    return RunSpec(
        task="accumulation",
        precision=PrecisionSpec(name="short", compute="fp32", recipe=recipe),
        gemm=GemmSpec(m=32, k=k, n=24),
    )


def test_errors_grow_as_bits_go_and_shrink_with_promotion(runs: Runs) -> None:
    def error(bits: int, promote_every: int = 0, k: int = 512) -> float:
        done = runs(product(AccumulationSpec(mantissa_bits=bits, promote_every=promote_every), k))
        assert done.end == ("ok", "")
        largest = done.values["accumulation_max_error"][0]
        assert 0 < done.values["accumulation_rms_error"][0] < largest
        return largest

    # Each bit halves the error; 10 and 13 bits are three apart.
    assert error(10) == pytest.approx(8 * error(13), rel=0.5)
    assert error(13, k=4096) > 2 * error(13)
    assert error(13, promote_every=128, k=4096) < 0.2 * error(13, k=4096)


def test_a_recipe_without_accumulator_is_refused(runs: Runs) -> None:
    status, reason = runs(product(None)).end
    assert status == "crashed" and "has no accumulation" in reason
