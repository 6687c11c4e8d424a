"""What a probe is, and the set of them that a training loop calls.

    probes = ProbeSet(run)                      # the probes that the run's spec asks for
    probes.begin()                              # before step 1; records at step 0
    for step in ...:
        probes.before_step(step)
        ...forward, backward, gradient norm...
        probes.after_backward(step, norm)       # gradients are there, not yet clipped
        ...clip, optimizer...
        probes.after_step(step, StepValues(loss, learning_rate, norm))
    probes.finish(step)

On several ranks the first one alone has probes, but for those that run steps themselves; probes that read whole weights
are left out, with a note, where no rank has them.

A probe is due at step 1, at multiples of its period and at the last step; at other steps it is not called
and has no hooks in the model. It must not draw from PyTorch's generators nor write to anything the training
reads. Each probe's time is recorded as `probe_ms` and is no part of the step time that `throughput`
records.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch

from harness.models.transformer import Transformer
from harness.registry import PROBES, probe_periods
from harness.spec import RunSpec

if TYPE_CHECKING:
    from harness.parallel.strategy import Strategy


class Recorder(Protocol):
    """The part of a journal that probes write to."""

    def measure(self, step: int, values: Mapping[str, float | None], scope: str = "") -> None: ...

    def note(self, name: str, value: Any, reason: str) -> None: ...


@dataclass
class RunContext:
    """The run as probes see it."""

    spec: RunSpec
    model: Transformer
    optimizer: torch.optim.Optimizer
    device: torch.device
    record: Recorder
    train_step: Callable[[int], object]
    """One whole training step (forward to optimizer) on the batch of that step, without probes."""
    validation_loss: Callable[[], float]
    """Mean held-out loss in the run's own precision; moves no scale and no history."""
    strategy: Strategy | None = None
    """How this rank takes part in a step."""
    rank: int = 0
    """Of several, the first one records."""
    first_step: int = 1
    """Above 1 when the run resumes; then what stands at step 0 was recorded by the attempt before."""
    rare_tokens: Callable[[int], int] = lambda step: 0
    """Rare tokens in the batch of a step."""
    replaying: bool = False
    """True while a probe itself runs parts of the model: other probes' hooks look away."""
    step_seconds: list[float] = field(default_factory=list)
    """Seconds of each step since `throughput` last emptied the list, probes' own time left out."""


@dataclass(slots=True)
class StepValues:
    """What the training loop knows after a step. Tensors are read only by the probes that need them."""

    loss: float
    learning_rate: float
    gradient_norm: float | torch.Tensor | None = None
    """Global L2 norm before clipping; None where it was not computed."""


ON_ANY_MESH = ("loss", "throughput", "gradients", "collectives", "experts", "memory")
"""Probes that need no whole weights."""
ON_ALL_RANKS = ("memory",)
"""Probes that run training steps, in which every rank has its part."""
EVALUATING = ("ablation",)
"""Probes that evaluate, which is every rank's work too."""


def left_out(name: str, spec: RunSpec) -> str | None:
    """Why a probe has no place in a run on several ranks; None where it has."""
    mesh = spec.parallelism
    if mesh.num_ranks == 1 or name in ON_ANY_MESH:
        return None
    if name in EVALUATING:
        return "it evaluates the model, which takes all ranks, and probes run on the first one alone"
    if mesh.zero >= 2 or mesh.num_ranks > mesh.dp * mesh.cp:
        return "it reads whole weights, and every rank has a part of them"
    return None


class Probe:
    """Base class: override the moments you need. `self.run` is there from `begin` on."""

    name: ClassVar[str]
    works_inside: ClassVar[bool] = False
    """It has hooks in the model at due steps, so those steps say nothing about speed."""
    in_steps: ClassVar[bool] = True
    """False: it works before and after the training alone, whatever its period."""
    follows_rare_tokens: ClassVar[bool] = False
    """Also due at the first step of each period that has a rare token: what it watches happens there."""
    run: RunContext
    seconds: float = 0.0
    """Time spent so far, kept by the set and by `timed`."""
    num_recordings: int = 0
    """What that time is shared over: counted by the set for each due step, by the probe for what it adds outside."""

    def begin(self) -> None:
        """Before step 1."""

    def before_step(self, step: int) -> None:
        """At a due step, before its forward pass: the moment to put hooks in."""

    def after_backward(self, step: int, gradient_norm: float | torch.Tensor | None) -> None:
        """At a due step, between the backward pass and clipping: the moment to take hooks out."""

    def after_step(self, step: int, values: StepValues) -> None:
        """At a due step, after the optimizer."""

    def finish(self, step: int) -> None:
        """After the last step."""

    @contextmanager
    def timed(self) -> Iterator[None]:
        """For work inside hooks in the model, which the set cannot see."""
        start = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - start


class ProbeSet:
    """All probes of one run, called in the registry's order."""

    def __init__(self, run: RunContext) -> None:
        self._run = run
        periods = probe_periods(run.spec.probes)
        for name in list(periods):
            reason = left_out(name, run.spec)
            if reason is not None and run.rank == 0:
                run.record.note(f"probe_{name}", None, reason)
            if reason is not None or (run.rank and name not in ON_ALL_RANKS):
                del periods[name]
        self._probes: list[tuple[Probe, int]] = [
            (PROBES.load(name)(), every) for name, every in periods.items()
        ]
        self._keeps_time = "throughput" in periods
        self._due: list[Probe] = []
        self._started = 0.0
        for probe, _ in self._probes:
            probe.run = run

    def begin(self) -> None:
        """Call once, before step 1 or before the first step of a resumed run."""
        for probe, _ in self._probes:
            with probe.timed():
                probe.begin()

    def before_step(self, step: int) -> None:
        self._due = [probe for probe, every in self._probes if self._is_due(probe, every, step)]
        for probe in self._due:
            with probe.timed():
                probe.before_step(step)
        self._started = time.perf_counter() - self._cost_so_far()

    def after_backward(self, step: int, gradient_norm: float | torch.Tensor | None = None) -> None:
        for probe in self._due:
            with probe.timed():
                probe.after_backward(step, gradient_norm)

    def after_step(self, step: int, values: StepValues) -> None:
        if self._keeps_time:
            seconds = time.perf_counter() - self._cost_so_far() - self._started
            disturbed = any(probe.works_inside for probe in self._due)
            if not disturbed or not self._run.step_seconds:
                self._run.step_seconds.append(seconds)
        for probe in self._due:
            with probe.timed():
                probe.after_step(step, values)
            probe.num_recordings += 1

    def finish(self, step: int) -> None:
        """Let each probe finish, then record what they cost: `probe_ms`, the mean over its recordings."""
        for probe, _ in self._probes:
            with probe.timed():
                probe.finish(step)
        for probe, _ in self._probes:
            mean_ms = 1000 * probe.seconds / max(probe.num_recordings, 1)
            self._run.record.measure(step, {"probe_ms": mean_ms}, scope=probe.name)

    def _is_due(self, probe: Probe, every: int, step: int) -> bool:
        if not probe.in_steps:
            return False
        if step % every == 0 or step in (1, self._run.spec.num_steps):
            return True
        if not probe.follows_rare_tokens or not self._run.rare_tokens(step):
            return False
        return not any(self._run.rare_tokens(earlier) for earlier in range(step - step % every, step))

    def _cost_so_far(self) -> float:
        return sum(probe.seconds for probe in self._due)
