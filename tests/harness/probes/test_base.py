"""Probes change nothing, are called when due, and their cost is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from harness.probes.base import Probe, ProbeSet, RunContext, StepValues
from harness.registry import DEFAULT_PERIODS, PROBES, Registry, probe_periods
from harness.spec import PrecisionSpec, RunSpec

from .conftest import ALL_PROBES, FP8, FP32, Records, tiny_spec

Train = Callable[..., tuple[Any, Records]]


@pytest.mark.parametrize(
    ("precision", "ffn"),
    [
        (FP32, "swiglu"),
        (FP8, "swiglu"),
        (FP8, "smooth-swiglu"),
        (FP8.model_copy(update={"compute": "bf16"}), "smooth-swiglu-token"),
        (PrecisionSpec(name="bf16", compute="bf16"), "gelu"),
        (PrecisionSpec(name="fp16", compute="fp16", loss_scaling="dynamic"), "swiglu"),
    ],
)
def test_losses_and_weights_are_the_same_with_all_probes_and_none(
    train: Train, precision: PrecisionSpec, ffn: str
) -> None:
    model = {"ffn": ffn}
    none = {name: 0 for name in DEFAULT_PERIODS if name != "loss"}
    _, without = train(precision=precision, model=model, probes=none, rare_token_every=2)
    _, watched = train(precision=precision, model=model, probes=ALL_PROBES, rare_token_every=2)
    assert len(without.of("loss")) == 6
    assert watched.of("loss") == without.of("loss")
    assert watched.of("val_loss") == without.of("val_loss")
    assert watched.final_checkpoint == without.final_checkpoint


def test_the_test_above_can_fail(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    from harness.probes.activations import Activations

    _, before = train(probes={"activations": 1})
    monkeypatch.setattr(
        Activations, "before_step", lambda self, step: self.run.model.norm.weight.data.mul_(1.01)
    )
    _, after = train(probes={"activations": 1})
    assert before.of("loss") != after.of("loss")


def test_every_probe_records_its_cost(train: Train) -> None:
    _, records = train(precision=FP8, probes=ALL_PROBES)
    assert records.scopes("probe_ms") == set(PROBES)
    assert all(records.of("probe_ms", scope)[0] > 0 for scope in PROBES)  # type: ignore[operator]


def test_no_hooks_between_due_steps(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []

    def count(self: Probe, step: int, values: StepValues) -> None:
        counts.append(
            sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in self.run.model.modules())
        )

    monkeypatch.setattr("harness.probes.loss.Loss.after_step", count)
    train(precision=FP8, probes=ALL_PROBES)
    assert counts == [0] * 6


class Noted(Probe):
    """Notes the steps it is called at."""

    name = "loss"
    follows_rare_tokens = True

    def __init__(self) -> None:
        self.steps: list[int] = []

    def after_step(self, step: int, values: StepValues) -> None:
        self.steps.append(step)


def bare_run(spec: RunSpec, **more: Any) -> RunContext:
    """A run whose steps do nothing."""
    model: Any = torch.nn.Linear(1, 1)
    return RunContext(
        spec=spec,
        model=model,
        optimizer=torch.optim.SGD(model.parameters()),
        device=torch.device("cpu"),
        record=Records(),
        train_step=lambda step: None,
        validation_loss=lambda: 0.0,
        **more,
    )


def test_due_steps(corpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    noted = Noted()
    monkeypatch.setattr("harness.probes.loss.Loss", lambda: noted)
    spec = tiny_spec(corpus, tokens=22 * 32, probes={"loss": 5, "gradients": 0, "throughput": 0})
    probes = ProbeSet(bare_run(spec, rare_tokens=lambda step: int(step in (7, 8, 9, 15, 16))))
    for step in range(1, 23):
        probes.before_step(step)
        probes.after_step(step, StepValues(1.0, 0.1))
    assert noted.steps == [1, 5, 7, 10, 15, 20, 22]  # 16: its period's first rare step was 15


class Clock:
    """Stands for the module `time`: moves only when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


class Slow(Probe):
    """A probe of half a second before, in and after a step."""

    name = "gradients"
    works_inside = False
    clock: Clock

    def before_step(self, step: int) -> None:
        self.clock.now += 0.5

    def after_backward(self, step: int, gradient_norm: Any) -> None:
        self.clock.now += 0.5

    def after_step(self, step: int, values: StepValues) -> None:
        self.clock.now += 0.5


@pytest.mark.parametrize(("works_inside", "expected"), [(False, [1, 2, 3, 4, 5]), (True, [1, 3, 5])])
def test_step_time_leaves_probes_out(
    corpus: Any, monkeypatch: pytest.MonkeyPatch, works_inside: bool, expected: list[float]
) -> None:
    slow, clock = Slow(), Clock()
    slow.clock, slow.works_inside = clock, works_inside  # type: ignore[misc]
    monkeypatch.setattr("harness.probes.gradients.Gradients", lambda: slow)
    monkeypatch.setattr("harness.probes.base.time", clock)
    run = bare_run(tiny_spec(corpus, probes={"loss": 0, "gradients": 2, "throughput": 100}))
    probes = ProbeSet(run)
    probes._probes = [(probe, every) for probe, every in probes._probes if probe is slow]
    for step in range(1, 6):
        probes.before_step(step)
        clock.now += step
        probes.after_backward(step)
        probes.after_step(step, StepValues(1.0, 0.1))
    probes.finish(5)
    assert run.step_seconds == pytest.approx(expected)
    assert run.record.of("probe_ms", "gradients") == [pytest.approx(1500)]  # type: ignore[attr-defined]


def test_periods() -> None:
    assert probe_periods({}) == DEFAULT_PERIODS
    assert probe_periods({"throughput": 0, "weights": 7}) == {"loss": 1, "gradients": 1, "weights": 7}
    with pytest.raises(KeyError, match=r"unknown probe 'wieghts'; allowed: loss, .*did you mean weights\?"):
        probe_periods({"wieghts": 1})


def test_registry_loads_on_demand() -> None:
    numbers = Registry("number", {"pi": "math:pi", "none": "no_such_module:x"})
    assert list(numbers) == ["pi", "none"]
    assert numbers.load("pi") == pytest.approx(3.14159, abs=1e-5)
    with pytest.raises(ModuleNotFoundError):
        numbers.load("none")
    assert all(PROBES.load(name).name == name for name in PROBES)
