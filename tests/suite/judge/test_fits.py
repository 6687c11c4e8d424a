"""Coefficients by least squares: what is put in comes out, and what cannot be told apart is said."""

from __future__ import annotations

from typing import Any

import pytest

from harness.spec import ModelSpec, RunSpec
from suite.judge import blocker, judge
from suite.judge.fits import TermError, least_squares, read_terms

TERMS = ("seq_len * batch_size * model.d_model", "model.num_heads * seq_len^2 * batch_size", "1")


def specs() -> list[RunSpec]:
    return [
        RunSpec(
            task="step", batch_size=batch, seq_len=seq,
            model=ModelSpec(name="toy", num_layers=1, d_model=width, num_heads=heads, num_kv_heads=heads, d_ffn=64),
        )
        for batch in (1, 2) for seq in (16, 64) for width, heads in ((32, 2), (64, 8))
    ]  # fmt: skip


def bytes_of(spec: RunSpec) -> float:
    model = spec.model
    n = spec.seq_len * spec.batch_size
    return 34 * n * model.d_model + 5 * model.num_heads * spec.seq_len * n + 1000


def test_the_coefficients_that_were_put_in_come_out() -> None:
    fit = least_squares(specs(), [bytes_of(spec) for spec in specs()], read_terms(TERMS))
    assert fit is not None
    assert fit.coefficients == pytest.approx((34, 5, 1000), rel=1e-9)
    assert fit.largest_error < 1e-12


def test_terms_that_the_runs_do_not_tell_apart_give_no_fit() -> None:
    one = [spec for spec in specs() if spec.seq_len == 16 and spec.model.d_model == 32]
    assert least_squares(one, [bytes_of(spec) for spec in one], read_terms(TERMS)) is None
    assert least_squares(specs()[:2], [1.0, 2.0], read_terms(TERMS)) is None


@pytest.mark.parametrize(
    "text",
    ["seq_len ** 2", "__import__('os')", "model", "model.name", "sequence", "seq_len + 1", "2 * seq_len", ""],
)
def test_a_term_is_a_product_of_numbers_of_a_run_and_nothing_else(text: str) -> None:
    with pytest.raises(TermError):
        read_terms([text])


def world_of_steps(world: Any, claim: Any) -> Any:
    plan, store = world.Plan([], [claim]), world.FakeStore()
    for number, spec in enumerate(specs()):
        run = world.make_run("bf16", 0, number=number)
        run = type(run)(run.key, spec, run.labels)
        plan.runs.append(run)
        store.finish(run, {"saved_bytes": bytes_of(spec)})
    return plan, store


def test_a_claim_judges_the_first_coefficient_and_tells_all(world: Any) -> None:
    claim = world.claim("saved_bytes", {"within": [33.99, 34.01]}, of={"precision": "bf16"}, fit=TERMS)
    (verdict,) = judge(*world_of_steps(world, claim))
    assert verdict.verdict == "reproduced" and verdict.effect == pytest.approx(34)
    assert "over 8 runs: 34 (seq_len * batch_size * model.d_model) + 5 (model.num_heads" in verdict.reason


def test_a_fit_is_of_single_runs(world: Any) -> None:
    claim = world.claim("saved_bytes_ratio", {"at_most": 1}, against={"precision": "bf16"}, fit=["seq_len"])
    plan, _ = world_of_steps(world, claim)
    assert "single runs" in (blocker(claim, plan) or "")
