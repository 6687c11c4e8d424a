"""What a tensor core's short accumulator does to one product of random matrices, apart from the casts.

Operands [m, k] and [k, n] are standard normal and cast as the precision's recipe casts a forward product; then the
product with the recipe's accumulator is held against the FP64 product of the same cast operands.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from harness.precision.accumulate import matmul
from harness.precision.cast import cast, dequantize
from harness.spec import RunSpec
from results.journal import JournalWriter


def accumulation(
    spec: RunSpec, request: dict[str, Any], journal: JournalWriter, checkpoints: Path
) -> list[Path]:
    """Record the errors of one product over its root mean square; returns no files."""
    recipe, shape = spec.precision.recipe, spec.gemm
    if recipe is None or recipe.accumulation is None:
        raise ValueError(f"precision {spec.precision.name} has no accumulation to look at")
    device = torch.device(spec.device)
    generator = torch.Generator().manual_seed(spec.seed)
    operands = []
    for rows, role in ((shape.m, recipe.operands("forward")[0]), (shape.n, recipe.operands("forward")[1])):
        x = torch.randn(rows, shape.k, generator=generator).to(device)
        operands.append(x if role is None else dequantize(cast(x, role, seed=spec.seed)))
    left, right = operands[0], operands[1].t()
    exact = left.double() @ right.double()
    error = matmul(left, right, recipe.accumulation).double() - exact
    size = exact.square().mean().sqrt()
    journal.measure(
        0,
        {
            "accumulation_max_error": float(error.abs().max() / size),
            "accumulation_rms_error": float(error.square().mean().sqrt() / size),
        },
    )
    return []
