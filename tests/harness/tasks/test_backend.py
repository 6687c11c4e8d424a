"""What a training run's journal says of its backend, and what the database makes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.precision.backends import apply
from harness.precision.backends.select import Choice
from results.store import Store

from .conftest import PRECISIONS, Runs, run_spec


def notes(outcome: Any) -> dict[str, tuple[Any, str]]:
    return {record["n"]: (record["v"], record["r"]) for record in outcome.records if record["k"] == "note"}


def stored_fidelities(runs: Runs, tmp_path: Path) -> list[str]:
    """Of all runs so far, read twice."""
    with Store(tmp_path / "suite.duckdb") as store:
        for _ in range(2):
            for journal in sorted(runs.out.glob("journals/*/*/rank0.journal")):
                store.ingest(journal.parent)
        return [row[0] for row in store.query("SELECT fidelity FROM runs ORDER BY attempt")[1]]


def test_auto_on_a_cpu(runs: Runs, corpus: Path, tmp_path: Path) -> None:
    done = runs(run_spec(corpus, precision="fp8-delayed", tokens=96), fidelity="native")
    assert done.end == ("ok", "")
    backend, reason = notes(done)["backend"]
    assert backend == "emulated" and "compute capability 8.9" in reason and "a CPU" in reason
    assert stored_fidelities(runs, tmp_path) == ["emulated"], "whatever was asked for"


def test_without_a_recipe_there_is_no_backend_to_name(runs: Runs, corpus: Path, tmp_path: Path) -> None:
    assert "backend" not in notes(runs(run_spec(corpus, precision="bf16", tokens=96)))
    assert stored_fidelities(runs, tmp_path) == ["native"]


def test_native_products(runs: Runs, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's FP8 products exist on a CPU, as slow loops: the whole way of a native run but for its device."""
    emulated = runs(run_spec(corpus, precision="fp8-delayed", tokens=288))
    monkeypatch.setattr(apply, "choose_backend", lambda *given: Choice("torch", "native", "for the test"))
    native = runs(run_spec(corpus, precision="fp8-delayed", tokens=288), fidelity="emulated")
    assert native.end == ("ok", "") and notes(native)["backend"] == ("torch", "for the test")
    assert notes(native)["quantized_linears"] == notes(emulated)["quantized_linears"]
    assert native.losses == pytest.approx(emulated.losses, rel=0.01)
    assert stored_fidelities(runs, tmp_path) == ["emulated", "native"]


def test_asking_for_what_is_not_there(runs: Runs, corpus: Path) -> None:
    asked = PRECISIONS["fp8-delayed"].model_copy(update={"backend": "torch"})
    spec = run_spec(corpus, tokens=96).model_copy(update={"precision": asked})
    status, reason = runs(spec).end
    assert status == "crashed"
    assert (
        "backend torch cannot run it: compute capability 8.9 or above is needed, the device is a CPU"
        in reason
    )
