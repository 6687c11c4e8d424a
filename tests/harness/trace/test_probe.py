"""The probe `memory` of a training run is the task `step` of the same spec, on one process and on ranks."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.ledger.step import CATEGORIES

from .steps import make_spec, measured

MESHES: dict[str, dict[str, Any]] = {
    "single": {},
    "zero-3": {"dp": 2, "zero": 3},
    "pp": {"pp": 2},
    "ddp": {"dp": 2},
}


class Last:
    """A journal that keeps the last value of each metric."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, str], float | None] = {}

    def measure(self, step: int, values: Any, scope: str = "") -> None:
        self.values |= {(name, scope): value for name, value in values.items()}

    def note(self, name: str, value: Any, reason: str) -> None: ...

    def checkpoint(self, step: int, sha256: str, final: bool = False) -> None: ...

    def beat(self) -> None: ...


def train(mesh: dict[str, Any], probes: dict[str, int]) -> dict[tuple[str, str], float | None]:
    from harness.tasks.pretrain import pretrain

    torch.set_num_threads(1)
    spec = make_spec(mesh, tokens=3 * 8 * 32, probes=probes).model_copy(update={"task": "pretrain"})
    journal = Last()
    with tempfile.TemporaryDirectory() as folder:
        pretrain(spec, {}, journal, Path(folder))  # type: ignore[arg-type]
    return journal.values


@pytest.mark.parametrize("name", MESHES)
def test_the_probe_sees_what_the_step_sees(name: str, run_ranks: Callable[..., list[Any]]) -> None:
    mesh = MESHES[name]
    spec = make_spec(mesh)
    values = run_ranks(2, train, mesh, {"memory": 1})[0] if mesh else train(mesh, {"memory": 1})
    expected = measured(spec, run_ranks)
    for scope in (*CATEGORIES, "total"):
        assert values["peak_bytes", scope] == expected["peak_bytes", f"rank0.{scope}"], scope


@pytest.mark.parametrize("name", ["zero-3", "pp"])
def test_the_probed_step_leaves_no_trace(name: str, run_ranks: Callable[..., list[Any]]) -> None:
    """Validation after it gives the same loss as without."""
    probed, plain = (run_ranks(2, train, MESHES[name], {"memory": every})[0] for every in (1, 0))
    assert probed["val_loss", ""] == plain["val_loss", ""] is not None
