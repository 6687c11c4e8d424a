"""Faults put in on purpose: each becomes its status with a reason."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from harness.spec import FaultSpec, RunSpec
from harness.tasks import faults

from .conftest import NUM_STEPS, Runs

Spec = Callable[..., RunSpec]


def test_nan_is_divergence(runs: Runs, spec: Spec) -> None:
    done = runs(spec(fault=FaultSpec(kind="nan", step=3)))
    assert (done.code, done.end) == (11, ("diverged", "the loss is nan at step 3"))
    assert list(done.losses) == [1, 2, 3] and done.losses[3] != done.losses[3]
    assert done.values["num_nonfinite_loss"] == {3: 1}


def test_before_the_fault_the_run_is_as_it_would_be(runs: Runs, spec: Spec) -> None:
    plain, faulty = runs(spec()), runs(spec(fault=FaultSpec(kind="nan", step=3)))
    assert [faulty.losses[step] for step in (1, 2)] == [plain.losses[step] for step in (1, 2)]


def test_memory_beyond_the_limit_is_oom(runs: Runs, spec: Spec) -> None:
    done = runs.apart(spec(fault=FaultSpec(kind="oom", step=2)), memory_bytes=1 << 30)
    assert (done.code, done.end[0]) == (10, "oom")
    assert str(faults.GREED_BYTES) in done.end[1]
    assert list(done.losses) == [1]


def test_the_limit_alone_does_no_harm(runs: Runs, spec: Spec) -> None:
    done = runs.apart(spec(), memory_bytes=1 << 30)
    assert (done.code, done.end) == (0, ("ok", ""))
    assert len(done.losses) == NUM_STEPS


def test_crash_ends_the_process_without_a_word(runs: Runs, spec: Spec) -> None:
    done = runs.apart(spec(fault=FaultSpec(kind="crash", step=4)))
    assert done.code == -6  # SIGABRT: the parent names it
    assert done.end == ("", "")
    assert list(done.losses) == [1, 2, 3]  # all that was recorded before is there


def test_slow_sleeps_in_each_step_from_its_own_on(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    fault = FaultSpec(kind="slow", step=2)
    for step in (1, 2, 3):
        faults.strike(fault, step, torch.tensor(1.0))
    assert slept == [faults.SLOW_STEP_S] * 2


def test_hang_never_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    class EndlessError(Exception):
        pass

    naps = iter([None, None, EndlessError])

    def sleep(_seconds: float) -> None:
        if (error := next(naps)) is not None:
            raise error

    monkeypatch.setattr(time, "sleep", sleep)
    with pytest.raises(EndlessError):
        faults.strike(FaultSpec(kind="hang", step=2), 2, torch.tensor(1.0))


@pytest.mark.parametrize("kind", ["nan", "hang", "oom", "crash"])
def test_a_fault_strikes_once(kind: str) -> None:
    loss = torch.tensor(1.0)
    for step in (1, 3, 4):
        faults.strike(FaultSpec(kind=kind, step=2), step, loss)  # type: ignore[arg-type]
    faults.strike(None, 2, loss)
    assert float(loss) == 1
