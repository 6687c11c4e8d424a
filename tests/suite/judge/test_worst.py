"""Runs compared point by point: nothing is averaged, and one wrong point decides."""

from __future__ import annotations

import math
from typing import Any

import pytest

from suite.judge import blocker, judge
from suite.judge.decision import decide_worst, make_rule
from suite.judge.measures import UnknownMeasureError, find_measure, scope_matches
from suite.judge.worst import by_place, largest_difference


def points(*values: tuple[str, int, float]) -> Any:
    return by_place(values)


def test_the_largest_difference_is_found_wherever_it_lies() -> None:
    of = points(("", 1, 2.0), ("", 2, 1.5), ("", 3, 1.0))
    against = points(("", 1, 2.0), ("", 2, 1.0), ("", 3, 1.25))
    gap = largest_difference(of, against, "worst_gap")
    assert (gap.size, gap.of, gap.against, gap.step) == (0.5, 1.5, 1.0, 2)
    assert largest_difference(of, against, "worst_error").size == 0.5
    assert largest_difference(against, of, "worst_error").size == pytest.approx(1 / 3)


def test_what_one_run_lacks_counts_as_zero_there() -> None:
    of, against = (
        points(("dp.all_reduce", 5, 8.0), ("tp.all_gather", 5, 3.0)),
        points(("dp.all_reduce", 1, 8.0)),
    )
    assert largest_difference(of, against, "worst_gap").size == 3.0
    assert largest_difference(of, against, "worst_error").size == math.inf
    assert largest_difference(against, of, "worst_error").size == 1.0
    curve, cut = points(("", 1, 2.0), ("", 2, 2.0), ("", 3, 2.0)), points(("", 1, 2.0), ("", 2, 2.0))
    assert largest_difference(cut, curve, "worst_error").size == 1.0


def test_ranks_that_one_run_did_not_look_at_are_left_out() -> None:
    step = points(("rank0.weights", 5, 8.0), ("rank1.weights", 5, 9.0), ("rank0.gradients", 5, 1.0))
    trace = points(("rank0.weights", 1, 8.0), ("rank0.gradients", 1, 1.0))
    assert largest_difference(step, trace, "worst_gap").size == 0
    assert largest_difference(step, points(("rank0.weights", 1, 8.0)), "worst_gap").size == 1.0
    assert largest_difference(step, points(("rank7.weights", 1, 8.0)), "worst_gap").size == math.inf


def test_the_number_of_a_single_step_says_nothing() -> None:
    assert largest_difference(points(("weights", 5, 8.0)), points(("weights", 1, 8.0)), "worst_gap").size == 0


@pytest.mark.parametrize(
    ("effects", "word"), [([0.0, 1e-7], "reproduced"), ([0.0, 2e-6], "differs"), ([], "not run")]
)
def test_every_pair_must_keep_the_bound(effects: list[float], word: str) -> None:
    assert decide_worst(make_rule("at_most", 1e-6), effects).word == word


def test_an_infinite_error_differs() -> None:
    assert decide_worst(make_rule("at_most", 1e-6), [math.inf]).word == "differs"


def curves(world: Any, gaps: dict[str, float]) -> Any:
    """FP8's loss lies `gaps[ffn]` above BF16's at the second of three steps."""
    one = world.claim(
        "loss_worst_error", {"at_most": 1e-3}, of={"precision": "fp8"}, against={"precision": "bf16"}
    )
    plan, store = world.Plan([], [one]), world.FakeStore()
    for ffn, gap in gaps.items():
        for precision in ("bf16", "fp8"):
            run = world.make_run(precision, 0, ffn=ffn)
            plan.runs.append(run)
            store.finish(run)
            for step in (1, 2, 3):
                loss = 2.0 + (gap if precision == "fp8" and step == 2 else 0.0)
                store.measurements.append((run.key, "loss", "", step, loss))
    return plan, store


def test_the_worst_arm_decides_and_is_named(world: Any) -> None:
    plan, store = curves(world, {"swiglu": 0.0, "smooth": 0.02})
    (verdict,) = judge(plan, store)
    assert verdict.verdict == "differs" and verdict.effect == pytest.approx(0.01)
    assert "2 pairs of runs" in verdict.reason and "fp8 smooth at step 2: 2.02 against 2" in verdict.reason
    assert verdict.unit == "ratio" and verdict.low is None


def test_arms_that_agree_need_one_seed(world: Any) -> None:
    plan, store = curves(world, {"swiglu": 0.0, "smooth": 0.0})
    (verdict,) = judge(plan, store)
    assert verdict.verdict == "reproduced" and "no difference anywhere" in verdict.reason


def test_an_arm_that_failed_leaves_the_claim_open(world: Any) -> None:
    plan, store = curves(world, {"swiglu": 0.0, "smooth": 0.0})
    store.finish(plan.runs[-1], status="crashed", reason="RuntimeError: gone")
    (verdict,) = judge(plan, store)
    assert verdict.verdict == "not run" and "RuntimeError: gone" in verdict.reason


def test_labels_that_both_sides_name_alike_pair_the_runs(world: Any) -> None:
    """Without it each ddp run would be held against each ledger of any mesh."""
    where = {"ffn": ["a", "b"]}
    one = world.claim(
        "comm_bytes_worst_gap[rank*]", {"at_most": 0}, of={"precision": "fp8", **where},
        against={"precision": "bf16", **where},
    )  # fmt: skip
    plan, store = world.Plan([], [one]), world.FakeStore()
    for ffn, size in (("a", 100.0), ("b", 200.0)):
        for precision in ("bf16", "fp8"):
            run = world.make_run(precision, 0, ffn=ffn)
            plan.runs.append(run)
            store.finish(run, {"comm_bytes": size}, scope="rank0.dp.all_reduce")
            store.finish(
                run, {"comm_bytes": 4.0 if precision == "fp8" else 8.0}, scope="rank0.control.all_reduce"
            )
    (verdict,) = judge(plan, store)
    assert verdict.verdict == "reproduced" and verdict.effect == 0


def test_its_rule_is_an_upper_bound(world: Any) -> None:
    plan, _ = curves(world, {"swiglu": 0.0})
    claim = world.claim("loss_worst_error", {"at_least": 1}, against={"precision": "bf16"})
    assert "at_most or below" in (blocker(claim, plan) or "")


def test_two_scopes_are_compared_under_one_name() -> None:
    measure = find_measure("peak_bytes_worst_error[total:allocator.allocated]")
    assert (measure.scope, measure.against_scope) == ("total", "allocator.allocated")
    assert measure.chosen([("total", 1, 5.0), ("weights", 1, 4.0)]) == [("", 1, 5.0)]
    assert measure.of_against.chosen([("allocator.allocated", 5, 6.0)]) == [("", 5, 6.0)]
    with pytest.raises(UnknownMeasureError, match="single runs"):
        find_measure("peak_bytes[total:weights]")
    with pytest.raises(UnknownMeasureError, match="write loss_worst_error"):
        find_measure("final_loss_worst_error")


def test_a_run_may_be_held_against_its_own_prediction(world: Any) -> None:
    """Measured and predicted by one run, under two scopes: each run is its own partner."""
    same = {"precision": ["fp8", "bf16"]}
    one = world.claim("pipeline_idle_share_worst_gap[:formula]", {"at_most": 0.03}, of=same, against=same)
    plan, store = world.Plan([], [one]), world.FakeStore()
    for precision, measured in (("fp8", 0.21), ("bf16", 0.25)):
        run = world.make_run(precision, 0)
        plan.runs.append(run)
        store.finish(run, {"pipeline_idle_share": measured})
        store.finish(run, {"pipeline_idle_share": 0.20}, scope="formula")
    (verdict,) = judge(plan, store)
    assert verdict.verdict == "differs" and verdict.effect == pytest.approx(0.05)
    assert "2 pairs of runs" in verdict.reason and "0.25 against 0.2" in verdict.reason


@pytest.mark.parametrize(
    ("scope", "pattern", "matches"),
    [
        ("weights", "weights", True),
        ("rank1.weights", "weights", False),
        ("rank1.weights", "*", False),
        ("rank1", "", False),
        ("rank1.weights", "rank*", True),
        ("rank1.weights", "rank1.weights", True),
        ("control.all_reduce", "*", False),
        ("rank0.control.all_reduce", "rank*", False),
        ("control.all_reduce", "control.*", True),
        ("dp.all_reduce", "*", True),
        ("dp+cp.reduce_scatter", "dp*", True),
        ("layers.0.ffn.down", "ffn.down", True),
    ],
)
def test_ranks_and_bookkeeping_answer_when_named(scope: str, pattern: str, matches: bool) -> None:
    assert scope_matches(scope, pattern) is matches


def test_sums_are_over_what_the_largest_rank_recorded() -> None:
    recorded = [("dp.all_gather", 1, 8.0), ("dp.reduce_scatter", 1, 4.0), ("rank0.dp.all_gather", 1, 8.0)]
    assert find_measure("comm_bytes").of_run(recorded, 0) == 12.0
    assert find_measure("comm_bytes[dp.all_gather]").of_run(recorded, 0) == 8.0
