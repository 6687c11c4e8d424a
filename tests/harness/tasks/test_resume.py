"""A run that is killed and resumed has the curve of one that was not, to the bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from harness import worker
from harness.run import Run
from harness.spec import AgeingSpec, RunSpec
from harness.tasks import pretrain

from .conftest import NUM_STEPS, SPORADIC, Outcome, Runs, outcome

Spec = Callable[..., RunSpec]


class Killed(BaseException):
    """Ends a run as a signal would: nothing of the run's own code may catch it."""


@contextmanager
def killed_in_step(step: int) -> Iterator[None]:
    """The run dies in training step `step`, before anything of that step is recorded."""
    original = pretrain.training_step

    def train(run: Run, at: int, *args: Any) -> None:
        if at == step:
            raise Killed
        original(run, at, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrain, "training_step", train)
        yield


@dataclass
class Twice:
    """A run in two attempts."""

    first: Outcome
    second: Outcome
    resumed_after: int

    def curve(self, metric: str) -> dict[int, float]:
        """As the database joins attempts: a step's value is the later attempt's."""
        return self.first.values.get(metric, {}) | self.second.values.get(metric, {})


def interrupted(runs: Runs, spec: RunSpec, at: int, start_checkpoint: str | None = None) -> Twice:
    """Kill the run in step `at` and resume it from its newest resume point."""
    folder = runs.folder(spec, start_checkpoint=start_checkpoint)
    with killed_in_step(at), pytest.raises(Killed):
        worker.run(folder)
    first = outcome(-9, folder)
    assert first.end == ("", "")
    step, sha256 = first.checkpoints()[-1]
    second = runs(spec, start_checkpoint=start_checkpoint, resume_checkpoint=sha256)
    assert second.end == ("ok", "")
    return Twice(first, second, step)


ARMS: dict[str, dict[str, Any]] = {
    "fp32": {"precision": "fp32"},
    "bf16": {},
    "bf16-pure": {"precision": "bf16-pure"},
    "fp16": {"precision": "fp16"},
    "tied": {"model": {"tie_embeddings": True}},
    "fp8": {"precision": "fp8-delayed"},
    "fp8-stochastic": {"precision": "fp8-stochastic"},
    "fp8-smooth-sporadic": {
        "precision": "fp8-delayed",
        "model": {"ffn": "smooth-swiglu"},
        "ageing": SPORADIC,
    },
    "fp8-token-static": {
        "precision": "fp8-delayed",
        "model": {"ffn": "smooth-swiglu-token"},
        "ageing": AgeingSpec(name="static-6", kind="static", log2=6),
    },
    "plain-ageing": {"ageing": AgeingSpec(name="static-6", kind="static", log2=6, adam="plain")},
    "bf16-pure-smooth-static": {
        "precision": "bf16-pure",
        "model": {"ffn": "smooth-swiglu"},
        "ageing": AgeingSpec(name="static-6", kind="static", log2=6),
    },
}


@pytest.mark.parametrize("arm", ARMS)
def test_resumed_curves_are_equal_to_the_bit(runs: Runs, spec: Spec, arm: str) -> None:
    plan = spec(checkpoint_every_s=1e-9, **ARMS[arm])
    whole = runs(plan)
    twice = interrupted(runs, plan, at=5)
    assert twice.resumed_after == 4
    assert list(twice.second.losses) == [5, 6, 7, 8]
    for metric in ("loss", "val_loss", "gradient_norm", "learning_rate", "loss_scale", "num_skipped_steps"):
        assert twice.curve(metric) == whole.values.get(metric, {}), metric


def test_steps_after_the_last_resume_point_are_done_again(
    runs: Runs, spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = runs(spec(precision="fp8-delayed"))
    save = pretrain._save
    monkeypatch.setattr(pretrain, "_save", lambda run, last: save(run, last) if run.step == 3 else last)
    twice = interrupted(runs, spec(precision="fp8-delayed", checkpoint_every_s=1e-9), at=7)
    assert twice.resumed_after == 3
    assert list(twice.first.losses) == [1, 2, 3, 4, 5, 6]
    assert list(twice.second.losses) == [4, 5, 6, 7, 8]
    assert twice.curve("loss") == whole.losses
    assert all(twice.first.losses[step] == twice.second.losses[step] for step in (4, 5, 6))


def test_killed_again_and_again(runs: Runs, spec: Spec) -> None:
    plan = spec(precision="fp8-delayed", checkpoint_every_s=1e-9)
    whole, found, resume = runs(plan), {}, None
    for at in (2, 4, 7, 99):
        folder = runs.folder(plan, resume_checkpoint=resume)
        with killed_in_step(at):
            try:
                worker.run(folder)
            except Killed:
                assert at != 99
        attempt = outcome(0, folder)
        found |= attempt.losses
        resume = attempt.checkpoints()[-1][1]
        assert len(list((runs.out / "checkpoints").iterdir())) == (at != 99)  # one resume point, then none
    assert found == whole.losses


def test_a_skipped_step_counts_over_attempts(runs: Runs, spec: Spec, high_loss_scale: None) -> None:
    plan = spec(precision="fp16", checkpoint_every_s=1e-9)
    whole = runs(plan)
    twice = interrupted(runs, plan, at=5)
    assert whole.values["num_skipped_steps"][NUM_STEPS] >= 1
    for metric in ("loss", "loss_scale", "num_skipped_steps"):
        assert twice.curve(metric) == whole.values[metric]


def test_a_run_that_started_from_another_resumes_too(runs: Runs, spec: Spec) -> None:
    """Even where the base's checkpoint is no longer there."""
    base = spec(keep_checkpoint=True)
    ((_, sha256),) = runs(base).checkpoints(final=True)
    plan = spec(start_from=base, checkpoint_every_s=1e-9, ageing=SPORADIC, precision="fp8-delayed")
    whole = runs(plan, start_checkpoint=sha256)
    twice = interrupted(runs, plan, at=5, start_checkpoint=sha256)
    assert twice.curve("loss") == whole.losses
    assert twice.curve("val_loss") == whole.values["val_loss"]


def test_a_resumed_run_says_so_and_records_no_step_0(runs: Runs, spec: Spec) -> None:
    twice = interrupted(runs, spec(checkpoint_every_s=1e-9, ageing=SPORADIC), at=5)
    notes = [record for record in twice.second.records if record["k"] == "note" and record["n"] == "resumed"]
    assert notes[0]["v"] == 4
    assert list(twice.second.values["val_loss"]) == [NUM_STEPS]


def test_resume_points_change_no_loss_and_leave_the_kept_checkpoint(runs: Runs, spec: Spec) -> None:
    plain = runs(spec(keep_checkpoint=True))
    saved = runs(spec(keep_checkpoint=True, checkpoint_every_s=1e-9))
    assert saved.losses == plain.losses
    assert [step for step, _ in saved.checkpoints()] == list(range(1, NUM_STEPS))
    assert saved.checkpoints(final=True) == plain.checkpoints(final=True)
    assert len(list((runs.out / "checkpoints").iterdir())) == 1


def test_a_resume_point_outlives_the_training_it_is_of(
    runs: Runs, spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in the validation after the last step: only that is to be done again."""
    plan = spec(checkpoint_every_s=1e-9)
    folder = runs.folder(plan)
    original, calls = pretrain.validation_loss, []

    def validation_loss(run: Run) -> float:
        calls.append(run.step)
        if run.step == NUM_STEPS and len(calls) == 2:
            raise Killed
        return original(run)

    monkeypatch.setattr(pretrain, "validation_loss", validation_loss)
    with pytest.raises(Killed):
        worker.run(folder)
    step, sha256 = outcome(-9, folder).checkpoints()[-1]
    resumed = runs(plan, resume_checkpoint=sha256)
    assert resumed.end == ("ok", "")
    assert list(resumed.losses) == list(range(step + 1, NUM_STEPS + 1))
