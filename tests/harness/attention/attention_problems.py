"""Small problems with ties, and what a kernel makes of them."""

from __future__ import annotations

from typing import Any

from harness.attention.arithmetic import arithmetic
from harness.attention.problem import Problem, build
from harness.attention.statistics import bias_of
from harness.attention.tiled import exact, forward
from harness.spec import AttentionSpec


def small(**fields: Any) -> AttentionSpec:
    """40,960 elements of O over 640 rows, as in the case, with fewer keys."""
    return AttentionSpec(**{"kernel": "paper", "num_keys": 256, "num_queries": 16, "num_heads": 40, **fields})


def measure(spec: AttentionSpec, seed: int = 0) -> dict[str, float]:
    """Bias of O of an emulated kernel."""
    problem: Problem = build(spec, seed)
    found = forward(problem.q, problem.k, problem.v, arithmetic(spec), scale=problem.scale)
    ideal = exact(problem.q, problem.k, problem.v, scale=problem.scale)
    return bias_of(found.out, ideal.out)
