"""A run of a few seconds' fraction, watched by any probes, with its records kept in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.spec import (
    DataSpec,
    ModelSpec,
    OptimizerSpec,
    PrecisionSpec,
    QuantizerSpec,
    RecipeSpec,
    RunSpec,
)

E4M3 = QuantizerSpec(format="e4m3", scaling="delayed", history=4)
E5M2 = QuantizerSpec(format="e5m2", scaling="delayed", history=4)
FP8 = PrecisionSpec(name="fp8-delayed", recipe=RecipeSpec(activations=E4M3, weights=E4M3, gradients=E5M2))
FP32 = PrecisionSpec(name="fp32")
ALL_PROBES = {
    "throughput": 2,
    "weights": 3,
    "alignment": 3,
    "attention": 3,
    "activations": 2,
    "quantization": 2,
    "ablation": 1,
    "memory": 1,
    "collectives": 1,
    "experts": 1,
}


class Records:
    """Stands for a journal."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, str], list[tuple[int, float | None]]] = {}
        self.notes: dict[str, tuple[Any, str]] = {}

    def measure(self, step: int, values: Mapping[str, float | None], scope: str = "") -> None:
        for name, value in values.items():
            self.values.setdefault((name, scope), []).append((step, value))

    def note(self, name: str, value: Any, reason: str) -> None:
        self.notes[name] = value, reason

    def checkpoint(self, step: int, sha256: str, final: bool = False) -> None:
        self.final_checkpoint = sha256

    def beat(self) -> None:
        pass

    def of(self, name: str, scope: str = "") -> list[float | None]:
        return [value for _, value in self.values[name, scope]]

    def steps(self, name: str, scope: str = "") -> list[int]:
        return [step for step, _ in self.values[name, scope]]

    def scopes(self, name: str) -> set[str]:
        return {scope for metric, scope in self.values if metric == name}


def tiny_spec(corpus: Path, **changes: Any) -> RunSpec:
    """6 steps of a 2-layer model on bytes of `corpus`."""
    model = {"num_layers": 2, "d_model": 32, "num_heads": 2, "num_kv_heads": 1, "d_ffn": 48}
    spec: dict[str, Any] = {
        "model": ModelSpec(name="tiny", **{**model, **changes.pop("model", {})}),
        "precision": FP32,
        "optimizer": OptimizerSpec(lr=3e-3),
        "data": DataSpec(corpus=str(corpus), rare_token_every=changes.pop("rare_token_every", 0)),
        "tokens": 6 * 2 * 16,
        "batch_size": 2,
        "seq_len": 16,
        "val_tokens": 64,
        "keep_checkpoint": True,
    }
    return RunSpec(**{**spec, **changes})


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("corpus") / "text.txt"
    file.write_text("".join(f"{n} times {n} is {n * n}.\n" for n in range(400)))
    return file


@pytest.fixture
def train(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[RunSpec, Records]]:
    """Pretrain a tiny model as changed by the arguments: (spec, records)."""
    from harness.tasks.pretrain import pretrain

    torch.set_num_threads(1)  # two spinning threads are many times slower where cores are busy
    monkeypatch.setenv("SUITE_CACHE", str(tmp_path / "cache"))

    def run(**changes: Any) -> tuple[RunSpec, Records]:
        spec, records = tiny_spec(corpus, **changes), Records()
        pretrain(spec, {}, records, tmp_path / "checkpoints")  # type: ignore[arg-type]
        return spec, records

    return run
