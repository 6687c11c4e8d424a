"""Study: rows with tied maxima through one attention kernel, against FP64. Nothing is trained.

Everything is recorded at step 0; ulp means the BF16 spacing at the exact value of an element of O.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harness.attention import native
from harness.attention.arithmetic import Arithmetic, arithmetic
from harness.attention.backward import backward, exact_gradients
from harness.attention.problem import Problem, build
from harness.attention.statistics import bias_of, delta_statistics
from harness.attention.tiled import Forward, exact, forward
from harness.spec import RunSpec
from results.journal import JournalWriter


def attention(
    spec: RunSpec, request: dict[str, Any], journal: JournalWriter, checkpoints: Path
) -> list[Path]:
    """Measure `spec.attention`'s kernel on its problem. Raises harness.run.Skipped where there is no such kernel."""
    device = torch.device(spec.device)
    problem = _on(build(spec.attention, spec.seed), device)
    ideal = exact(problem.q, problem.k, problem.v, scale=problem.scale)
    if spec.attention.is_emulated:
        how = arithmetic(spec.attention)
        result = forward(problem.q, problem.k, problem.v, how, scale=problem.scale)
        journal.measure(0, {"tied_one_share": float((result.num_ones > 1).double().mean())})
    else:
        how = Arithmetic()
        result = _native(spec, problem, ideal, journal)
    journal.measure(0, bias_of(result.out, ideal.out))
    journal.measure(0, {"lse_error": _mean(result.lse.double() - ideal.lse)})
    operands = (problem.q, problem.k, problem.v)
    found = backward(*operands, result, problem.dout, how, scale=problem.scale, delta=spec.attention.delta)
    wanted = exact_gradients(*operands, ideal, problem.dout, scale=problem.scale)
    journal.measure(0, delta_statistics(found, wanted, problem.x))
    return []


def _native(spec: RunSpec, problem: Problem, ideal: Forward, journal: JournalWriter) -> Forward:
    """A native kernel's O, and its LSE (the exact one where it gives none)."""
    kernel = "flash" if spec.attention.kernel == "default" else spec.attention.kernel
    q, k, v = (x.to(torch.bfloat16) for x in (problem.q, problem.k, problem.v))
    out, lse = native.attend(kernel, q, k, v, problem.scale)
    if lse is None:
        journal.note(
            "lse_error", None, f"{kernel} does not return its log-sum-exp; P is made of the exact one"
        )
    else:
        error = native.sum_of_equal(kernel, spec.attention.num_keys, spec.attention.d_head, q.device)
        journal.measure(0, {"exp_sum_error": error})
    # What O was before it was rounded is the kernel's own affair.
    return Forward(
        out.float(), ideal.out.float(), (ideal.lse if lse is None else lse).float(), ideal.num_ones
    )


def _mean(x: Tensor) -> float:
    return float(x[x.isfinite()].mean()) if bool(x.isfinite().any()) else math.nan


def _on(problem: Problem, device: torch.device) -> Problem:
    moved = (x.to(device) for x in (problem.q, problem.k, problem.v, problem.dout, problem.x))
    q, k, v, dout, x = moved
    return Problem(q, k, v, dout, x, problem.scale)
