"""Published formulas against the numbers printed with them, and the simulation against the formulas."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from harness.ledger import bubble
from harness.ledger.schedules import Action, Pipeline, order, schedule_problem
from harness.ledger.simulate import Durations, in_flight, peak_in_flight, simulate
from harness.ledger.transfers import transfers, weight_gathers
from harness.spec import ParallelismSpec

EQUAL = Durations()
TIMES = (
    EQUAL,
    *(Durations(1, 1.5, 0.5), Durations(1, 1, 0.5), Durations(2, 3, 1), Durations(2, 1, 3)),
    *(Durations(3, 1, 1), Durations(1, 2, 1), Durations(1, 3, 2), Durations(2, 2, 1)),
)
SHAPES: list[tuple[Any, int]] = [
    *(("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3)),
    *(("zero-bubble", 1), ("zero-bubble", 2), ("zbv", 2), ("dualpipev", 2)),
]


def possible(schedule: Any, v: int) -> list[Pipeline]:
    sizes = itertools.product((2, 3, 4, 8), (2, 3, 4, 6, 8, 12, 16, 24))
    return [Pipeline(schedule, p, m, v) for p, m in sizes if not schedule_problem(schedule, p, m, v)]


def test_both_normalisations() -> None:
    """(p - 1) / m over the ideal time is (p - 1) / (m + p - 1) of the whole."""
    for p, m in itertools.product((2, 4, 8), (4, 8, 16)):
        x = bubble.one_f_one_b(p, m)
        assert x == (p - 1) / m
        assert bubble.idle_share(x) == pytest.approx((p - 1) / (m + p - 1))
        assert bubble.overhead(bubble.idle_share(x)) == pytest.approx(x)


def test_gpipe_s_bubble_is_negligible_at_four_microbatches_a_rank() -> None:
    assert bubble.is_negligible(8, 32)
    assert not bubble.is_negligible(8, 31)
    assert bubble.idle_share(bubble.one_f_one_b(8, 32)) < 0.2


def test_zero_bubble_schedules_at_equal_times() -> None:
    """Qi et al.: 1F1B (p - 1) / m, ZB1P (p - 1) / (3 m), ZB2P and ZBV none; DeepSeek's rows are the same times."""
    p, m = 8, 32
    assert bubble.zero_bubble_1(p, m) == pytest.approx(bubble.one_f_one_b(p, m) / 3)
    assert bubble.zero_bubble_2() == bubble.zero_bubble_v() == 0
    assert bubble.deepseek_1f1b(p, 1, 2) == 3 * (p - 1)
    assert bubble.deepseek_zb1p(p, 1, 2, 1) == p - 1
    assert bubble.deepseek_1f1b(p, 1, 2) / (3 * m) == pytest.approx(bubble.one_f_one_b(p, m))
    assert bubble.deepseek_zb1p(p, 1, 2, 1) / (3 * m) == pytest.approx(bubble.zero_bubble_1(p, m))
    assert bubble.deepseek_dualpipe(8, 3, 2, 1) == 6
    assert bubble.deepseek_dualpipe(8, 2, 2, 1) == 3  # F and B of which a third is hidden


def test_batch_time_of_narayanan() -> None:
    """(b' / b + p - 1)(t_f + t_b): the simulation's makespan."""
    for p, m in ((2, 4), (4, 8), (8, 8)):
        assert simulate(Pipeline("1f1b", p, m)).makespan == bubble.batch_time(m, 1, p, 1, 2)
    assert bubble.batch_time(128, 2, 4, 1, 2, data_parallel=8) == (8 + 3) * 3


@pytest.mark.parametrize(("schedule", "v"), SHAPES)
def test_simulation_is_the_formula_where_one_applies(schedule: Any, v: int) -> None:
    applied = 0
    for pipeline, times in itertools.product(possible(schedule, v), TIMES):
        wanted = bubble.predicted_overhead(pipeline, times)
        if wanted is None:
            continue
        timeline = simulate(pipeline, times)
        assert timeline.overhead == pytest.approx(wanted), (pipeline, times)
        assert timeline.idle_share() == pytest.approx(bubble.idle_share(wanted))
        window = bubble.predicted_window_overhead(pipeline, times)
        assert window is not None
        assert timeline.window_idle_share == pytest.approx(bubble.idle_share(window), abs=1e-12), pipeline
        applied += 1
    assert applied >= 10


def test_zbv_with_few_microbatches_is_not_zero_bubble() -> None:
    """Below 2 p - 1 torch leaves microbatches out of the plan for 2 p - 1, and idle time is back."""
    for p in (4, 8):
        assert simulate(Pipeline("zbv", p, 2 * p - 1, 2)).window_idle_share == pytest.approx(0, abs=1e-12)
        few = Pipeline("zbv", p, p, 2)
        assert bubble.predicted_overhead(few) is None
        assert simulate(few).window_idle_share > 0.1


def test_no_formula_with_slow_transfers() -> None:
    slow = Durations(p2p=0.5)
    assert bubble.predicted_overhead(Pipeline("1f1b", 4, 8), slow) is None
    assert simulate(Pipeline("1f1b", 4, 8), slow).makespan > simulate(Pipeline("1f1b", 4, 8)).makespan


@pytest.mark.parametrize(("schedule", "v"), SHAPES)
def test_in_flight_is_the_formula_where_one_applies(schedule: Any, v: int) -> None:
    applied = 0
    for pipeline in possible(schedule, v):
        for rank, held in enumerate(peak_in_flight(pipeline)):
            wanted = bubble.predicted_in_flight(pipeline, rank)
            if wanted is not None:
                assert held == wanted, (pipeline, rank)
                applied += 1
    assert applied >= 10 or (schedule, v) == ("zero-bubble", 2)


def test_in_flight_counts() -> None:
    """1F1B p - r, GPipe m, and Korthikanti's L (1 + (p - 1) / (p v)) layers on the first rank of an interleaved one."""
    assert peak_in_flight(Pipeline("1f1b", 4, 16)) == (4, 3, 2, 1)
    assert peak_in_flight(Pipeline("gpipe", 4, 16)) == (16,) * 4
    for p, v, layers in ((4, 2, 32), (8, 4, 64), (8, 3, 96)):
        chunks = peak_in_flight(Pipeline("interleaved", p, 4 * p, v))[0]
        assert chunks * layers / (p * v) == pytest.approx(bubble.layers_in_flight(layers, p, v))
    assert bubble.layers_in_flight(96, 8) == 96
    assert peak_in_flight(Pipeline("zbv", 4, 16, 2)) == (8,) * 4  # halves: as much as 1F1B's first rank
    assert in_flight([Action("F", 0, 0), Action("I", 0, 0), Action("F", 0, 1), Action("W", 0, 0)]) == 2


@pytest.mark.parametrize(("schedule", "v"), SHAPES)
def test_a_rank_never_works_on_two_things(schedule: Any, v: int) -> None:
    """Spans follow the order without overlap, and whatever is needed has ended."""
    for pipeline in possible(schedule, v)[:8]:
        timeline = simulate(pipeline, Durations(1, 1.5, 0.75, p2p=0.1))
        ends = {span.action: span.end for rank in timeline.spans for span in rank}
        for rank, spans in enumerate(timeline.spans):
            assert tuple(span.action for span in spans) == order(pipeline, rank)
            assert all(a.end <= b.start for a, b in itertools.pairwise(spans))
            for span in spans:
                kind, stage, microbatch = span.action
                if kind == "F" and stage:
                    assert ends[Action("F", stage - 1, microbatch)] <= span.start
                if kind == "W":
                    assert ends[Action("I", stage, microbatch)] <= span.start


def test_transfers() -> None:
    """b s h forward and back for every microbatch and boundary; v times as many interleaved, twice as many in a V."""
    m, p = 8, 4
    for schedule, v, boundaries in (
        ("1f1b", 1, 3),
        ("interleaved", 2, 7),
        ("zbv", 2, 6),
        ("dualpipev", 2, 6),
    ):
        pipeline = Pipeline(schedule, p, m, v)  # type: ignore[arg-type]
        found = [transfers(pipeline, rank) for rank in range(p)]
        assert sum(each.sends for each in found) == sum(each.receives for each in found) == 2 * m * boundaries
    assert transfers(Pipeline("1f1b", p, m), 0).sends == m
    assert transfers(Pipeline("1f1b", p, m), 1).sends == 2 * m
    assert bubble.p2p_bytes(1, 2048, 12288, 2) == 50_331_648
    assert bubble.p2p_bytes(1, 2048, 12288, 2, tensor_parallel=8) == 6_291_456


def test_weight_gathers() -> None:
    def gathers(**mesh: Any) -> int:
        return weight_gathers(ParallelismSpec(dp=2, pp=2, microbatches=8, **mesh))

    assert gathers(zero=2) == gathers(zero=2, schedule="zbv") == 1
    assert gathers(zero=3) == gathers(zero=3, schedule="interleaved") == 9
    with pytest.raises(ValueError, match="at most 3 stages a rank"):
        gathers(zero=3, schedule="interleaved", stages_per_rank=4)
