"""The task itself on ranks: what it records, the weights it keeps, and a run that starts from them on another mesh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from harness.spec import DataSpec, RunSpec
from harness.tasks.pretrain import pretrain
from tests.harness.parallel.conftest import run_ranks
from tests.harness.parallel.training import FP64, make_spec


class Kept:
    """A journal in memory."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, int], float] = {}
        self.notes: dict[str, Any] = {}
        self.checkpoints: list[str] = []
        self.num_beats = 0

    def measure(self, step: int, values: Any, scope: str = "") -> None:
        self.values |= {(name, step): float(value) for name, value in values.items() if value is not None}

    def note(self, name: str, value: Any, reason: str) -> None:
        self.notes[name] = value

    def checkpoint(self, step: int, sha256: str, final: bool = False) -> None:
        self.checkpoints.append(sha256)

    def beat(self) -> None:
        self.num_beats += 1


def run(spec: RunSpec, folder: str, start: str | None = None) -> Kept:
    """The whole task on this rank."""
    journal = Kept()
    request = {} if start is None else {"start_checkpoint": start}
    pretrain(spec, request, journal, Path(folder))  # type: ignore[arg-type]
    return journal


@pytest.fixture
def data(tmp_path: Path) -> DataSpec:
    text = tmp_path / "text.txt"
    text.write_text("".join(chr(97 + (i * i // 7) % 26) for i in range(40_000)))
    return DataSpec(corpus=str(text))


def spec_of(data: DataSpec, mesh: dict[str, Any], **changes: Any) -> RunSpec:
    return make_spec(
        mesh, steps=3, data=data, val_tokens=512, keep_checkpoint=True, precision=FP64, **changes
    )


MESHES: list[dict[str, Any]] = [{"dp": 2, "zero": 3}, {"tp": 2, "sequence_parallel": True}, {"pp": 2}]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_runs_hand_on_their_weights_whatever_the_mesh(
    mesh: dict[str, Any], data: DataSpec, tmp_path: Path
) -> None:
    folder = str(tmp_path / "checkpoints")
    base = spec_of(data, {})
    alone = run(base, folder)
    first, *others = run_ranks(2, run, spec_of(data, mesh), folder)
    assert len(first.checkpoints) == 1 and all(not other.values for other in others), "the first rank records"
    for name in ("loss", "gradient_norm", "val_loss"):
        mine = {step: value for (metric, step), value in first.values.items() if metric == name}
        wanted = {step: value for (metric, step), value in alone.values.items() if metric == name}
        assert mine == pytest.approx(wanted, rel=1e-12), name
    assert {step for metric, step in first.values if metric == "val_loss"} == {0, 3}

    arm = spec_of(data, {}, start_from=base, seed=1)
    on_mesh = spec_of(data, mesh, start_from=base, seed=1)
    expected = run(arm, folder, alone.checkpoints[0])
    from_mesh = run(arm, folder, first.checkpoints[0])
    (to_mesh, _) = run_ranks(2, run, on_mesh, folder, alone.checkpoints[0])
    for step in (1, 2, 3):
        wanted = pytest.approx(expected.values["loss", step], rel=1e-9)
        assert from_mesh.values["loss", step] == wanted
        assert to_mesh.values["loss", step] == wanted
    assert expected.values["loss", 1] != alone.values["loss", 1]


def steps_seen(spec: RunSpec) -> list[int]:
    """Steps at whose start the flight file is told of them."""
    from harness.tasks import pretrain as task
    from tests.harness.parallel.training import prepare

    seen: list[int] = []
    task.at_step = lambda step, fault: seen.append(step)  # type: ignore[assignment]
    run_of_rank = prepare(spec)
    for step in (1, 2):
        task.training_step(run_of_rank, step)
    assert dist.is_initialized()
    return seen


def test_every_step_is_announced() -> None:
    assert run_ranks(2, steps_seen, make_spec({"dp": 2})) == [[1, 2], [1, 2]]


def beats(folder: str, data: DataSpec, steps: int) -> int:
    """Signs of life of this rank in a run of so many steps."""
    journal = Kept()
    spec = make_spec({"dp": 2}, steps=steps, data=data, val_tokens=0)
    pretrain(spec, {}, journal, Path(folder))  # type: ignore[arg-type]
    return journal.num_beats


def test_a_rank_that_records_nothing_shows_life_each_step(data: DataSpec, tmp_path: Path) -> None:
    """Else it is taken for hung once its steps have taken limits.hang_s."""
    (_, few), (_, many) = (run_ranks(2, beats, str(tmp_path), data, steps) for steps in (2, 7))
    assert many - few >= 5
