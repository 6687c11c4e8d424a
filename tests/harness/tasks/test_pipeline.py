"""The study of sleeping stages: PyTorch's real schedules do what the ledger's orders say, and it is recorded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from harness.ledger.bubble import idle_share, one_f_one_b
from harness.ledger.schedules import Action, Pipeline, orders
from harness.ledger.simulate import peak_in_flight
from harness.spec import ParallelismSpec, PipelineSpec, RunSpec
from harness.tasks.pipeline import NUM_PASSES, Passes, pipeline
from tests.harness.parallel.conftest import run_ranks

BRIEF = PipelineSpec(forward_ms=1, input_ms=1, weight_ms=1)


def make_spec(times: PipelineSpec = BRIEF, **mesh: Any) -> RunSpec:
    return RunSpec(task="pipeline", parallelism=ParallelismSpec(**mesh), pipeline=times)


class Recorded:
    """A journal in memory."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, str], float] = {}

    def measure(self, step: int, values: Mapping[str, float], scope: str = "") -> None:
        assert not self.values.keys() & {(metric, scope) for metric in values}
        self.values |= {(metric, scope): value for metric, value in values.items()}

    def beat(self) -> None: ...


def record(spec: RunSpec) -> dict[tuple[str, str], float]:
    journal = Recorded()
    assert pipeline(spec, {}, journal, Path()) == []  # type: ignore[arg-type]
    return journal.values


def passed(spec: RunSpec) -> list[list[tuple[Action, float, float]]]:
    """Every rank's spans of a pass, as each rank learns them."""
    import torch.distributed as dist

    timeline = Passes(spec, dist.get_rank()).run(spec.pipeline)
    return [[(span.action, span.start, span.end) for span in rank] for rank in timeline.spans]


def halves(action: Action) -> set[Action]:
    """A whole backward pass sleeps for both of its halves, in an order of autograd's."""
    if action.kind != "B":
        return {action}
    return {action._replace(kind="I"), action._replace(kind="W")}


@pytest.mark.parametrize(
    "mesh",
    [
        *({"schedule": name} for name in ("gpipe", "1f1b", "interleaved", "zero-bubble", "zbv", "dualpipev")),
        {"schedule": "interleaved", "stages_per_rank": 3},
        {"schedule": "zero-bubble", "stages_per_rank": 2},
    ],
    ids=lambda mesh: "-".join(str(value) for value in mesh.values()),
)
def test_torch_carries_out_the_ledger_s_order(mesh: dict[str, Any]) -> None:
    """Action by action on real ranks; whatever an action needs has ended before it begins."""
    spec = make_spec(pp=2, microbatches=4, **mesh)
    plan = Pipeline.of(spec.parallelism)
    first, second = run_ranks(2, passed, spec)
    assert first == second
    ends = {action: end for rank in first for action, _, end in rank}
    for spans, order in zip(first, orders(plan), strict=True):
        done = [action for action, _, _ in spans]
        for wanted in order:
            found = set(done[: len(halves(wanted))])
            # The first stage's input needs no gradient, so torch leaves its I to the W that follows.
            if wanted.stage == 0 and wanted.kind == "I":
                continue
            if wanted.stage == 0 and wanted.kind == "W":
                found = set(done[:2])
                assert found == halves(wanted._replace(kind="B"))
            else:
                assert found == halves(wanted)
            done = done[len(found) :]
        assert not done
        for action, start, end in spans:
            assert end - start >= 1
            if action.kind == "F" and action.stage:
                assert ends[action._replace(stage=action.stage - 1)] <= start
            if action.kind == "I" and action.stage < plan.num_stages - 1:
                assert ends[action._replace(stage=action.stage + 1)] <= start


def test_what_is_recorded() -> None:
    """Measured, simulated and by formula; microbatches in flight agree in all three."""
    spec = make_spec(pp=2, schedule="1f1b", microbatches=4)
    first, second = run_ranks(2, record, spec)
    assert second == {}
    share = {scope: value for (metric, scope), value in first.items() if metric == "pipeline_idle_share"}
    assert set(share) == {
        *("", "rank0", "rank1", "window", "pass1", "pass2", "pass3"),
        *("simulated", "simulated-rank0", "simulated-rank1", "simulated-window", "formula", "formula-window"),
    }
    assert share[""] == min(share[f"pass{number}"] for number in range(1, NUM_PASSES + 1))
    assert share["formula"] == pytest.approx(share["simulated"]) == idle_share(one_f_one_b(2, 4))
    assert 0 < share[""] < 1
    assert first["pipeline_overhead", "formula"] == one_f_one_b(2, 4)
    assert first["pipeline_makespan_ms", "formula"] == pytest.approx(15)
    for scope, held in (("", 2), ("rank0", 2), ("rank1", 1)):
        for source in ("", "simulated", "formula"):
            name = "-".join(filter(None, (source, scope)))
            assert first["pipeline_in_flight", name] == held, name


def test_where_no_formula_applies_none_is_recorded() -> None:
    uneven = PipelineSpec(forward_ms=1, input_ms=2, weight_ms=1)
    first, _ = run_ranks(2, record, make_spec(uneven, pp=2, schedule="zbv", microbatches=4))
    assert ("pipeline_idle_share", "formula") not in first
    assert ("pipeline_idle_share", "simulated") in first
    assert first["pipeline_in_flight", "formula"] == first["pipeline_in_flight", ""] == 4


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zbv", "dualpipev"])
def test_in_flight_on_four_ranks(schedule: str) -> None:
    spec = make_spec(pp=4, schedule=schedule, microbatches=8)
    first = run_ranks(4, record, spec)[0]
    peaks = peak_in_flight(Pipeline.of(spec.parallelism))
    assert [first["pipeline_in_flight", f"rank{rank}"] for rank in range(4)] == list(peaks)


def test_other_axes_have_no_place() -> None:
    with pytest.raises(ValueError, match="no axis but pp"):
        pipeline(make_spec(pp=2, dp=2), {}, Recorded(), Path())  # type: ignore[arg-type]
