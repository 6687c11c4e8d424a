"""Runs of a tiny model through the worker itself, on a run folder as the command makes it."""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from harness import worker
from harness.launch.child import limit_memory
from harness.spec import (
    AgeingSpec,
    DataSpec,
    ModelSpec,
    OptimizerSpec,
    PrecisionSpec,
    QuantizerSpec,
    RecipeSpec,
    RunSpec,
)
from results.journal import read_journal

NUM_STEPS = 8


def delayed(fmt: str) -> QuantizerSpec:
    return QuantizerSpec(format=fmt, scaling="delayed", history=3)  # type: ignore[arg-type]


PRECISIONS = {
    "fp32": PrecisionSpec(name="fp32"),
    "bf16": PrecisionSpec(name="bf16", compute="bf16"),
    "bf16-pure": PrecisionSpec(name="bf16-pure", compute="bf16", weights="bf16"),
    "fp16": PrecisionSpec(name="fp16", compute="fp16", loss_scaling="dynamic"),
    "fp8-delayed": PrecisionSpec(
        name="fp8-delayed",
        compute="bf16",
        recipe=RecipeSpec(activations=delayed("e4m3"), weights=delayed("e4m3"), gradients=delayed("e5m2")),
    ),
    "fp8-stochastic": PrecisionSpec(
        name="fp8-stochastic",
        compute="bf16",
        recipe=RecipeSpec(gradients=QuantizerSpec(format="e5m2", rounding="stochastic")),
    ),
}
SPORADIC = AgeingSpec(name="sporadic-10", kind="sporadic", log2=10)


def run_spec(corpus: Path, **changes: Any) -> RunSpec:
    """8 steps of 4 x 24 bytes with a 2-layer model, the rare token in about every other one."""
    shape = {"num_layers": 2, "d_model": 32, "num_heads": 2, "num_kv_heads": 1, "d_ffn": 48}
    fields = {
        "model": ModelSpec(name="tiny", **{**shape, **changes.pop("model", {})}),
        "precision": PRECISIONS[changes.pop("precision", "bf16")],
        "optimizer": OptimizerSpec(lr=3e-3),
        "data": DataSpec(corpus=str(corpus), rare_token_every=2),
        "tokens": NUM_STEPS * 4 * 24,
        "batch_size": 4,
        "seq_len": 24,
        "val_tokens": 192,
    }
    return RunSpec(**{**fields, **changes})


@dataclass
class Outcome:
    """What a run left: its exit status and its journal."""

    code: int
    records: list[dict[str, Any]]
    values: dict[str, dict[int, float]] = field(default_factory=dict)
    """metric -> step -> value, scope ""."""

    def __post_init__(self) -> None:
        for record in self.records:
            if record["k"] == "m" and not record.get("c"):
                for name, value in record["v"].items():
                    self.values.setdefault(name, {})[record["s"]] = value

    @property
    def losses(self) -> dict[int, float]:
        return self.values["loss"]

    @property
    def end(self) -> tuple[str, str]:
        """(status, reason); ("", "") where the run did not come to write one."""
        ends = [(record["status"], record["reason"]) for record in self.records if record["k"] == "end"]
        return ends[-1] if ends else ("", "")

    def checkpoints(self, final: bool = False) -> list[tuple[int, str]]:
        found = [
            record for record in self.records if record["k"] == "checkpoint" and record["final"] == final
        ]
        return [(record["s"], record["sha256"]) for record in found]


@dataclass
class Runs:
    """An output folder and the runs in it."""

    out: Path
    num_runs: int = 0

    def folder(self, spec: RunSpec, **request: Any) -> Path:
        self.num_runs += 1
        folder = self.out / "journals" / spec.key / str(self.num_runs)
        folder.mkdir(parents=True)
        content = {
            "run_id": f"{spec.key}.{self.num_runs}",
            "key": spec.key,
            "attempt": self.num_runs,
            "spec": spec.model_dump(mode="json"),
            "start_checkpoint": None,
            "resume_checkpoint": None,
            **request,
        }
        (folder / "run.json").write_text(json.dumps(content))
        return folder

    def __call__(self, spec: RunSpec, **request: Any) -> Outcome:
        """Carry the run out in this process."""
        folder = self.folder(spec, **request)
        return outcome(worker.run(folder), folder)

    def apart(self, spec: RunSpec, memory_bytes: int | None = None) -> Outcome:
        """Carry it out in a forked process, for runs that bring theirs down."""
        folder = self.folder(spec)
        process = multiprocessing.get_context("fork").Process(target=_alone, args=(folder, memory_bytes))
        process.start()
        process.join(timeout=60)
        assert process.exitcode is not None
        return outcome(process.exitcode, folder)


def outcome(code: int, folder: Path) -> Outcome:
    journal = read_journal(folder / "rank0.journal")
    assert not journal.cut
    return Outcome(code, journal.records)


def _alone(folder: Path, memory_bytes: int | None) -> None:
    faulthandler.disable()  # pytest's would print the stack of a crash that is wanted
    limit_memory(memory_bytes)
    raise SystemExit(worker.run(folder))


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("corpus") / "text.txt"
    file.write_text("".join(f"{n} times {n} is {n * n}.\n" for n in range(500)))
    return file


@pytest.fixture(autouse=True, scope="session")
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SUITE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def high_loss_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start loss scaling at 2^24, where the first steps' FP16 gradients overflow."""
    scaler = torch.amp.GradScaler
    monkeypatch.setattr(torch.amp, "GradScaler", lambda *args, **kw: scaler(*args, init_scale=2.0**24, **kw))


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


@pytest.fixture
def spec(corpus: Path) -> Callable[..., RunSpec]:
    return lambda **changes: run_spec(corpus, **changes)
