"""A backend that can be known to be impossible is refused before anything runs."""

from __future__ import annotations

from typing import Any

import pytest

from suite.declare import CaseError

CASE = """
question: Does it run?
base:
  model: llama-0.3m
  tokens: 64
  batch_size: 1
  seq_len: 16
  device: {device}
  precision: {preset}
claims: []
"""


@pytest.mark.parametrize(
    ("preset", "backend", "device", "words"),
    [
        ("fp8-current", "torch", "cpu", ("compute capability 8.9", "a CPU")),
        ("mxfp8", "transformer_engine", "cpu", ("compute capability 10.0",)),
        ("w4a4-int4", "torch", "cuda", ("int4",)),
        ("fp8-row", "transformer_engine", "cuda", ("row scaling",)),
    ],
)
def test_refused(plan_of: Any, preset: str, backend: str, device: str, words: tuple[str, ...]) -> None:
    with pytest.raises(CaseError) as error:
        plan_of(CASE.format(preset=preset, device=device), f"precision.backend={backend}")
    assert all(word in str(error.value) for word in (f"precision {preset}", f"backend {backend}", *words))


@pytest.mark.parametrize(
    ("preset", "backend", "device"),
    [
        ("fp8-current", "torch", "cuda"),
        ("fp8-current", "emulated", "cpu"),
        ("fp8-current", "auto", "cpu"),
        ("w4a4-int4", "auto", "cuda"),
        ("bf16", "torch", "cpu"),
    ],
)
def test_taken(plan_of: Any, preset: str, backend: str, device: str) -> None:
    (run,) = plan_of(CASE.format(preset=preset, device=device), f"precision.backend={backend}").runs
    assert run.spec.precision.backend == backend
