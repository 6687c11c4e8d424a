"""Small made-up plans and results for the judge's tests: no database, no training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from harness.spec import ModelSpec, PrecisionSpec, QuantizerSpec, RecipeSpec, RunSpec
from suite.declare.schema import Claim

MODEL = ModelSpec(name="toy", num_layers=1, d_model=32, num_heads=1, num_kv_heads=1, d_ffn=64, vocab_size=272)
FP8 = QuantizerSpec(format="e4m3")
PRECISIONS = {
    "bf16": PrecisionSpec(name="bf16", compute="bf16"),
    "fp8": PrecisionSpec(name="fp8", recipe=RecipeSpec(activations=FP8, weights=FP8, gradients=FP8)),
}


@dataclass(frozen=True)
class Run:
    key: str
    spec: RunSpec
    labels: dict[str, Any]


@dataclass
class Plan:
    runs: list[Run]
    claims: list[Claim]
    size: str = "laptop"

    @property
    def case(self) -> Any:
        return SimpleNamespace(name="toy_case", claims=self.claims)

    def select(self, where: Mapping[str, Any]) -> list[Run]:
        return [run for run in self.runs if all(_matches(run.labels, *item) for item in where.items())]


def _matches(labels: Mapping[str, Any], label: str, wanted: Any) -> bool:
    return label in labels and labels[label] in (wanted if isinstance(wanted, list) else [wanted])


@dataclass
class FakeStore:
    """Answers what the judge asks of a `results.store.Store`."""

    rows: dict[str, Any] = field(default_factory=dict)
    measurements: list[tuple[str, str, str, int, float]] = field(default_factory=list)
    environments: dict[str, tuple[str, str | None, str | None, str]] = field(
        default_factory=lambda: {"here": ("2 cores", None, None, "2.13.0")}
    )

    def status_of(self, keys: Iterable[str]) -> dict[str, Any]:
        return {key: self.rows[key] for key in keys if key in self.rows}

    def values(self, keys: Iterable[str], metrics: Iterable[str]) -> list[tuple[str, str, str, int, float]]:
        wanted, names = set(keys), set(metrics)
        return [row for row in self.measurements if row[0] in wanted and row[1] in names]

    def environment(self, environment_id: str) -> dict[str, Any] | None:
        found = self.environments.get(environment_id)
        names = ("machine", "gpu", "driver", "torch")
        return None if found is None else dict(zip(names, found, strict=True))

    def finish(
        self,
        run: Run,
        values: Mapping[str, float] | None = None,
        *,
        status: str = "ok",
        reason: str = "",
        environment: str = "here",
        fidelity: str | None = None,
        scope: str = "",
    ) -> None:
        """Say how a run ended; `values` are recorded at its last step."""
        self.rows[run.key] = SimpleNamespace(
            key=run.key,
            status=status,
            reason=reason,
            fidelity=fidelity or run.spec.fidelity,
            environment_id=environment,
        )
        for metric, value in (values or {}).items():
            self.measurements.append((run.key, metric, scope, run.spec.num_steps, value))


def make_run(precision: str, seed: int, **labels: Any) -> Run:
    spec = RunSpec(model=MODEL, precision=PRECISIONS[precision], tokens=10_240, seed=seed)
    labels = {"precision": precision, **labels, "seed": seed}
    key = "-".join(str(value) for value in labels.values())
    return Run(key, spec, labels)


def claim(measure: str, expect: Mapping[str, Any], **fields: Any) -> Claim:
    fields.setdefault("of", {"precision": "fp8"})
    if measure.endswith(("_gap", "_ratio")) or "_gap[" in measure:
        fields.setdefault("against", {"precision": "bf16"})
    return Claim.model_validate({"id": "c", "measure": measure, "expect": dict(expect), **fields})


def two_arms(gaps: Sequence[float], one: Claim, *, base: float = 2.0) -> tuple[Plan, FakeStore]:
    """A pair a seed: bf16's loss is about `base`, and fp8's lies `gaps[seed]` above it."""
    plan, store = Plan([], [one]), FakeStore()
    for seed, gap in enumerate(gaps):
        reference = base + 0.05 * seed
        for precision, loss in (("bf16", reference), ("fp8", reference + gap)):
            run = make_run(precision, seed)
            plan.runs.append(run)
            store.finish(run, {"loss": loss})
    return plan, store


@pytest.fixture
def world() -> Any:
    """The builders above, for tests to take by name."""
    return SimpleNamespace(
        Plan=Plan,
        FakeStore=FakeStore,
        make_run=make_run,
        claim=claim,
        two_arms=two_arms,
        PRECISIONS=PRECISIONS,
    )
