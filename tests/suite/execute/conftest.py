"""Plans of tiny runs for the fake worker of tests/harness/launch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.spec import ModelSpec, PrecisionSpec, RunSpec
from results.store import Store
from suite.declare import Plan, PlannedRun
from suite.execute import Finished, Outcome, execute

FAKE_WORKER = Path(__file__).resolve().parents[2] / "harness" / "launch"
MODEL = ModelSpec(name="tiny", num_layers=1, d_model=8, num_heads=1, num_kv_heads=1, d_ffn=8)


def make_spec(seed: int, steps: int = 2, **fields: Any) -> RunSpec:
    values: dict[str, Any] = {
        "model": MODEL,
        "precision": PrecisionSpec(name="fp32"),
        "tokens": steps,
        "batch_size": 1,
        "seq_len": 2,
        "seed": seed,
        **fields,
    }
    values["tokens"] = steps * values["batch_size"] * values["seq_len"]
    return RunSpec(**values)


def make_run(seed: int, steps: int = 2, base: PlannedRun | None = None, **more: Any) -> PlannedRun:
    """`more`: fields of the spec, and labels for the fake worker."""
    fields = {name: more.pop(name) for name in list(more) if name in RunSpec.model_fields}
    if base is not None:
        fields["start_from"] = base.spec
    spec = make_spec(seed, steps, **fields)
    return PlannedRun(spec.key, spec, {"seed": seed, **more}, "arm", base.key if base else None)


def make_plan(*runs: PlannedRun) -> Plan:
    case: Any = SimpleNamespace(name="test", path=Path("test.yaml"))
    return Plan(case, "laptop", "a test", runs)


class Bench:
    """Executes plans in one out folder with the fake worker."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.events: list[Any] = []

    def run(self, *runs: PlannedRun, **options: Any) -> Outcome:
        self.events = []
        options = {"on_event": self.events.append, **options}
        return execute(make_plan(*runs), self.out, worker="fake_worker", **options)

    @property
    def finished(self) -> list[Finished]:
        return [event for event in self.events if isinstance(event, Finished)]

    @property
    def store(self) -> Store:
        return Store(self.out / "suite.duckdb", wait_s=10)

    def attempts(self, run: PlannedRun) -> list[tuple[int, str, str]]:
        rows = self.store.query(
            "SELECT attempt, status, reason FROM runs WHERE key = ? ORDER BY attempt", [run.key]
        )
        return [tuple(row) for row in rows[1]]  # type: ignore[misc]

    def started(self) -> list[tuple[str, int, int]]:
        """(key, attempt, pid) in the order in which the workers began."""
        path = self.out / "order.txt"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(key, int(attempt), int(pid)) for key, attempt, pid in (line.split() for line in lines)]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setenv("PYTHONPATH", str(FAKE_WORKER))
    monkeypatch.setenv("SUITE_LAUNCH", "fork" if sys.platform == "linux" else "spawn")
    yield Bench(tmp_path / "out")


@pytest.fixture
def make() -> Callable[..., PlannedRun]:
    return make_run
