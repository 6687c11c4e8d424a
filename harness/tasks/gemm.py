"""Time one matrix product on the device's own path for a kernel, and check that it is the right product.

Two speeds a round: of the product alone, its operands cast before, and of casts and product together, as a training
step needs them from BF16 tensors. A kernel that the device lacks makes the run `skipped`: an emulated product has no
speed worth a number. The product is held against the emulation's, so that a fast wrong kernel is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harness.gemm.available import lacking
from harness.gemm.kernels import multiply, ready
from harness.gemm.operands import QUANTIZERS, Operand, dequantized, operand_of
from harness.gemm.timing import Timer
from harness.precision.backends.packages import installed
from harness.precision.cast import cast, dequantize
from harness.run import Skipped
from harness.spec import RunSpec
from harness.spec.gemm import KERNELS, GemmSpec, unfit
from harness.spec.notation import parse_cast
from results.journal import JournalWriter

CHECKED_ROWS = 64
TOLERANCE = 0.05
"""Largest error, over the largest element, that still is the same product. BF16 output errs by 2^-9, FP8 tensor cores
that keep about 14 bits of a sum by up to 2 % at k = 4096 (DeepSeek-V3, section 3.3); a wrong scale or layout by 1 and
more."""


def gemm(spec: RunSpec, request: dict[str, Any], journal: JournalWriter, checkpoints: Path) -> list[Path]:
    """Time `spec.gemm`; returns no files. Raises Skipped where the device has no such kernel."""
    product = spec.gemm
    if reason := unfit(product):
        raise ValueError(reason)
    device = usable_device(spec.device, product)
    x, w = random_operands(product, spec.seed, device)
    found = calls(product, x, w)
    error, mismatches = check(product, x, w, found)
    journal.measure(0, {"gemm_error": error, "gemm_operand_mismatches": mismatches})
    if not error <= TOLERANCE:  # NaN is wrong too
        raise RuntimeError(
            f"{product.kernel} errs by {error:.3g} of the largest element; {TOLERANCE:g} is allowed"
        )
    timer = Timer(device, spec.threads)
    journal.note("clock", timer.clock, "what times are of")
    journal.note("casts", _cast_note(product), "what gemm_with_cast_tflops times beside the product")
    flops = 2 * product.m * product.k * product.n
    num_alone, num_together = timer.warm_up(found.alone), timer.warm_up(found.together)
    for step in range(1, product.rounds + 1):
        # In turns, so that a change of the clock rate meets both.
        alone = timer.round(found.alone, num_alone)
        together = alone if found.operands is None else timer.round(found.together, num_together)
        journal.measure(
            step,
            {
                "gemm_tflops": flops / alone / 1e12,
                "gemm_with_cast_tflops": flops / together / 1e12,
                "gemm_us": alone * 1e6,
            },
        )
        journal.beat()
    return []


def usable_device(name: str, product: GemmSpec) -> torch.device:
    """The device called `name`. Raises Skipped with the compute capability that the kernel needs."""
    capability = None
    if name == "cuda":
        if not torch.cuda.is_available():
            raise Skipped("it needs an NVIDIA GPU, and PyTorch sees none")
        capability = torch.cuda.get_device_capability()
    if reason := lacking(product.kernel, name, capability, installed()):
        raise Skipped(reason)
    return torch.device(name)


def random_operands(product: GemmSpec, seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """x [m, k] and w [n, k] of a normal distribution, as BF16 (FP32 for the fp32 kernel)."""
    generator = torch.Generator(device).manual_seed(seed)
    dtype = torch.float32 if product.kernel == "fp32" else torch.bfloat16
    shapes = (product.m, product.k), (product.n, product.k)
    x, w = (torch.randn(shape, generator=generator, device=device).to(dtype) for shape in shapes)
    return x, w


@dataclass(frozen=True)
class Calls:
    """What is timed, and the operands of the product."""

    alone: Callable[[], Tensor]
    together: Callable[[], Tensor]
    """Casts and product; the same as `alone` where nothing is cast."""
    operands: tuple[Operand, Operand] | None
    """As cast, before their scales were laid out for the kernel; None where nothing is cast."""


def calls(product: GemmSpec, x: Tensor, w: Tensor) -> Calls:
    """The product alone and the product with its casts."""
    name = product.kernel
    if KERNELS[name].casts is None:

        def plain() -> Tensor:
            return x @ w.t()

        return Calls(plain, plain, None)

    left, right = QUANTIZERS[name]

    def cast_both(x: Tensor, w: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        return left(x), right(w)

    # Compiled, the passes of a cast become one or two kernels, which is how frameworks run them.
    fast = torch.compile(cast_both, dynamic=False) if x.device.type == "cuda" else cast_both

    def operands() -> tuple[Operand, Operand]:
        parts, other_parts = fast(x, w)
        return operand_of(parts), operand_of(other_parts)

    raw = operands()
    laid_out = ready(name, *raw)

    def alone() -> Tensor:
        return multiply(name, *laid_out, fast_accumulation=product.fast_accumulation)

    def together() -> Tensor:
        return multiply(name, *ready(name, *operands()), fast_accumulation=product.fast_accumulation)

    return Calls(alone, together, raw)


def check(product: GemmSpec, x: Tensor, w: Tensor, found: Calls) -> tuple[float, int]:
    """(error of the product, number of operand elements that differ from the emulation's).

    The error is the largest difference from the emulated product over that product's largest element, on 64 rows or so
    spread over it. The emulation is the plain PyTorch one, which no kernel can mislead.
    """
    rows = torch.arange(0, product.m, max(1, product.m // CHECKED_ROWS), device=x.device)
    left, right, mismatches = x, w, 0
    casts = KERNELS[product.kernel].casts
    if casts is not None and found.operands is not None:
        left, right = (
            dequantize(cast(tensor, parse_cast(word), implementation="torch"))
            for tensor, word in zip((x, w), casts, strict=True)
        )
        for mine, theirs in zip((left, right), found.operands, strict=True):
            mismatches += int((mine != dequantized(theirs)).sum())
    wanted = left[rows].double() @ right.double().t()
    error = (found.alone()[rows].double() - wanted).abs().max() / wanted.abs().max()
    return float(error), mismatches


def _cast_note(product: GemmSpec) -> str:
    casts = KERNELS[product.kernel].casts
    return (
        f"{casts[0]} of the left and {casts[1]} of the right operand"
        if casts
        else "nothing: no cast is needed"
    )
