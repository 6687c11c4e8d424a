"""The collectives probe: what a run on ranks records, and the profiler's intervals."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness.ledger.communication import collectives
from harness.probes.base import ProbeSet, RunContext, left_out
from harness.probes.collectives import Collectives, intervals
from harness.spec import RunSpec
from harness.tasks.pretrain import training_step
from tests.harness.parallel.conftest import run_ranks
from tests.harness.parallel.training import VOCAB, make_spec, prepare

Measured = dict[tuple[int, str, str], float | None]


class Kept:
    """A journal in memory."""

    def __init__(self) -> None:
        self.values: Measured = {}
        self.notes: dict[str, tuple[Any, str]] = {}

    def measure(self, step: int, values: dict[str, float | None], scope: str = "") -> None:
        self.values |= {(step, name, scope): value for name, value in values.items()}

    def note(self, name: str, value: Any, reason: str) -> None:
        self.notes[name] = value, reason


def watched(spec: RunSpec) -> tuple[Measured, dict[str, tuple[Any, str]]]:
    run, kept = prepare(spec), Kept()
    probes = ProbeSet(
        RunContext(
            spec=spec,
            model=run.model,
            optimizer=run.optimizer,
            device=run.device,
            record=kept,
            strategy=run.strategy,
            rank=dist.get_rank() if dist.is_initialized() else 0,
            train_step=lambda step: training_step(run, step),
            validation_loss=lambda: 0.0,
        )
    )
    probes.begin()
    for step in range(1, spec.num_steps + 1):
        probes.before_step(step)
        training_step(run, step, probes)
    probes.finish(spec.num_steps)
    return kept.values, kept.notes


def test_a_step_on_ranks() -> None:
    spec = make_spec({"dp": 2, "zero": 3}, steps=3, accumulation=2, probes={"collectives": 2, "weights": 1})
    (values, notes), (others, _) = run_ranks(2, watched, spec)
    assert others == {}, "one rank records"
    assert "comm_exposed_share" in notes
    assert "whole weights" in notes["probe_weights"][1]
    for each in collectives(spec, VOCAB, 0):
        scope = f"{each.axis}.{each.op}"
        for step in (1, 2, 3):
            assert values[step, "comm_bytes", scope] == each.num_bytes
            assert values[step, "comm_count", scope] == each.count
            assert values[step, "comm_sent_bytes", scope] == each.sent_bytes
            assert (values[step, "comm_ms", scope] or 0) > 0


def test_one_rank_says_why_there_is_nothing() -> None:
    values, notes = watched(make_spec(steps=1, probes={"collectives": 1}))
    assert not [name for _, name, _ in values if name.startswith("comm")]
    assert notes["comm_bytes"][0] is None


@pytest.mark.parametrize(
    ("mesh", "probe", "is_out"),
    [
        ({}, "weights", False),
        ({"dp": 2}, "weights", False),
        ({"dp": 2, "cp": 2}, "quantization", False),
        ({"dp": 2, "zero": 2}, "weights", True),
        ({"tp": 2}, "alignment", True),
        ({"pp": 2}, "activations", True),
        ({"dp": 2}, "ablation", True),
        ({"tp": 2}, "loss", False),
        ({"pp": 2}, "memory", False),
    ],
)
def test_probes_that_ranks_have_no_place_for(mesh: dict[str, int], probe: str, is_out: bool) -> None:
    assert (left_out(probe, make_spec(mesh)) is not None) == is_out


def event(name: str, start: int, duration: int, device: Any = torch.autograd.DeviceType.CUDA) -> Any:
    return SimpleNamespace(
        name=lambda: name,
        start_ns=lambda: start,
        duration_ns=lambda: duration,
        device_type=lambda: device,
    )


def test_nccl_s_kernels_are_told_from_the_others() -> None:
    events = [
        event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 10**9, 2 * 10**9),
        event("sm90_xmma_gemm_bf16", 2 * 10**9, 3 * 10**9),
        event("aten::mm", 0, 9 * 10**9, torch.autograd.DeviceType.CPU),
    ]
    profile = SimpleNamespace(profiler=SimpleNamespace(kineto_results=SimpleNamespace(events=lambda: events)))
    assert intervals(profile) == ([(1.0, 3.0)], [(2.0, 5.0)])
    probe, kept = Collectives(), Kept()
    probe.run = SimpleNamespace(record=kept)  # type: ignore[assignment]
    probe._profile = profile
    probe._record_intervals(7)
    assert kept.values == {(7, "comm_ms", ""): 2000.0, (7, "comm_exposed_share", ""): 0.25}


def test_a_real_profile_has_the_events_that_are_read() -> None:
    """The names that PyTorch gives an event's fields; a CPU has no kernels, so the lists are empty."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        torch.ones(4).sum()
    events = profile.profiler.kineto_results.events()
    assert events and all(each.start_ns() > 0 and each.duration_ns() >= 0 for each in events)
    assert intervals(profile) == ([], [])
