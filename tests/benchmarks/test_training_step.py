"""Tokens per CPU-second of our training step against nanoGPT's and the Hugging Face Trainer's, same shape.

    python -m pytest tests/benchmarks/test_training_step.py --benchmark-json=step.json

Each side runs in a process of its own, as its user would run it, one after the other for some rounds, so the
ratios hold on a busy machine. They stand in `extra_info`, and nothing is asserted about them.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.launch.base import worker_environment

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("step_process.py")
ROUNDS = {"llama-0.8m": 3, "llama-15m": 1}


OURS = ("suite", "compiled", "torchao")
"""Sides that run the worker's own step, and so in its environment."""


def run_side(side: str, model: str, precision: str) -> dict[str, float]:
    command = [sys.executable, str(SCRIPT), side, model, precision]
    environment = worker_environment() if side in OURS else None
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300, env=environment)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    assert result["last_loss"] < result["first_loss"]  # it learns: real steps are compared
    return result


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("model", list(ROUNDS))
@pytest.mark.parametrize("peer", ["nanogpt", "huggingface"])
def test_step_against(benchmark: Any, peer: str, model: str, precision: str) -> None:
    if peer == "huggingface" and importlib.util.find_spec("transformers") is None:
        pytest.skip("pip install 'lowprec-suite[bench]'")
    pairs: list[tuple[float, float]] = []

    def one_round() -> None:
        ours, theirs = (run_side(side, model, precision)["tokens_per_cpu_s"] for side in ("suite", peer))
        pairs.append((ours, theirs))

    benchmark.pedantic(one_round, rounds=ROUNDS[model])
    benchmark.extra_info["tokens_per_cpu_s"] = round(statistics.median(ours for ours, _ in pairs))
    benchmark.extra_info["their_tokens_per_cpu_s"] = round(statistics.median(theirs for _, theirs in pairs))
    benchmark.extra_info["speed_ratio"] = round(statistics.median(ours / theirs for ours, theirs in pairs), 3)


EMULATED = {
    # precision -> (what it is measured against, peers in the same rounds)
    "fp8-bf16": (("compiled", "bf16"), ("suite", "bf16"), ("torchao", "bf16")),
    "fp8-fp32": (("suite", "fp32"), ("torchao", "fp32")),
}


@pytest.mark.parametrize("precision", list(EMULATED))
def test_emulated_fp8_step(benchmark: Any, precision: str) -> None:
    """What emulating FP8 on every hidden linear costs, as a multiple of the unquantised step. The cost of an
    emulation, never a speed of FP8."""
    others = [
        other for other in EMULATED[precision] if other[0] != "torchao" or importlib.util.find_spec("torchao")
    ]
    rounds: list[dict[tuple[str, str], float]] = []
    # With --benchmark-disable the question is only whether it runs.
    model = "llama-15m" if benchmark.enabled else "llama-0.8m"

    def one_round() -> None:
        sides = [("suite", precision), *others]
        rounds.append({side: run_side(side[0], model, side[1])["tokens_per_cpu_s"] for side in sides})

    benchmark.pedantic(one_round, rounds=2)
    for other in others:
        ratios = [speeds[other] / speeds["suite", precision] for speeds in rounds]
        benchmark.extra_info[f"cost_against_{'_'.join(other)}"] = round(statistics.median(ratios), 3)
