"""The entry point of every cast: chooses the implementation and checks the arguments.

    result = cast(x, parse_cast("mxfp8"), along=1, carrier=torch.bfloat16)
    x_hat = dequantize(result)

Three implementations give the same bits: C++ on a CPU, Triton on CUDA, and the PyTorch twin anywhere, which also takes
what the kernels do not cover. Under torch.compile a kernel is called as one operator; the twin is traced.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Literal, Protocol

import torch
from torch import Tensor

from harness.precision import graph_operator, twin
from harness.precision.result import NO_NOISE_DB, CastResult, CastStatistics, dequantize
from harness.spec import QuantizerSpec

__all__ = ["NO_NOISE_DB", "CastResult", "CastStatistics", "cast", "dequantize", "implementation_for"]

Implementation = Literal["torch", "cpp", "triton"]
KERNELS = {"cpp": "harness.precision.kernel.cpu", "triton": "harness.precision.triton_kernel"}
CARRIERS = (torch.float32, torch.bfloat16)


class Kernel(Protocol):
    """What a kernel's module offers."""

    def available(self) -> bool: ...

    def reason(self) -> str:
        """Why it is available, or why not."""

    def cast_tensor(
        self,
        x: Tensor,
        spec: QuantizerSpec,
        *,
        along: int,
        carrier: torch.dtype,
        scale: Tensor | None,
        amax: Tensor | None,
        seed: int | None,
        collect: bool,
        dequantized: bool,
    ) -> CastResult | None:
        """The cast, or None where the kernel does not cover it."""


def cast(
    x: Tensor,
    spec: QuantizerSpec,
    *,
    along: int = 1,
    carrier: torch.dtype = torch.float32,
    scale: Tensor | None = None,
    amax: Tensor | None = None,
    seed: int | None = None,
    collect: bool = False,
    dequantized: bool = False,
    implementation: Implementation | None = None,
) -> CastResult:
    """`x` [rows, cols] (any float dtype and strides) cast as `spec` says; no gradient.

    along        dimension the product contracts; blocks lie along it, rows are what it crosses
    carrier      dtype of the values, FP32 or BF16
    scale        factor before the cast (FP32 scalar), for delayed and current scaling
    amax         maximum to scale by instead of the tensor's own (FP32 scalar, as when ranks share it): delayed,
                 current and nvfp4. Delayed scaling with neither is scaled by the tensor itself.
    seed         of stochastic rounding (`noise.noise_seed`); the noise of an element depends on seed and place alone
    collect      also count and sum what the cast did
    dequantized  multiply by the outer factor too, so that `inverse` is None
    implementation  None: the fastest there is (`implementation_for`)

    The spec's `hadamard` is the caller's to apply beforehand. Raises ValueError for arguments that do not fit.
    """
    _check(x, spec, along, carrier, scale, amax, seed)
    if torch.compiler.is_compiling():
        if implementation is None and not collect and _has_kernel(x.device.type):
            found, factor, largest = graph_operator.quantize(
                x, graph_operator.text(spec), along, carrier == torch.bfloat16, scale, amax, seed, dequantized
            )
            inverse = factor if graph_operator.has_inverse(spec, dequantized) else None
            return CastResult(found, inverse, largest, None, along)
        implementation = "torch"
    name = implementation or implementation_for(x.device)[0]
    if name != "torch":
        if name not in KERNELS:
            raise ValueError(f"implementation takes torch, cpp or triton, not {name!r}")
        kernel, why = _kernel(name)
        if kernel is None:
            raise ValueError(f"no {name} kernel here: {why}")
        result = kernel.cast_tensor(
            x, spec, along=along, carrier=carrier, scale=scale, amax=amax, seed=seed, collect=collect,
            dequantized=dequantized,
        )  # fmt: skip
        if result is not None:
            return result
    return twin.cast_tensor(
        x, spec, along=along, carrier=carrier, scale=scale, amax=amax, seed=seed, collect=collect,
        dequantized=dequantized,
    )  # fmt: skip


def implementation_for(device: torch.device | str) -> tuple[Implementation, str]:
    """(name, why) of the fastest implementation for tensors on `device`, to be stored with a run."""
    kind = torch.device(device).type
    if kind not in ("cpu", "cuda"):
        return "torch", f"no kernel for {kind} tensors"
    name: Implementation = "cpp" if kind == "cpu" else "triton"
    kernel, why = _kernel(name)
    return ("torch" if kernel is None else name), why


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _has_kernel(kind: str) -> bool:
    return implementation_for(kind)[0] != "torch"


@cache
def _kernel(name: Implementation) -> tuple[Kernel | None, str]:
    """The kernel's module, or None, and why."""
    try:
        kernel: Kernel = importlib.import_module(KERNELS[name])
    except ModuleNotFoundError as error:
        return None, f"{error.name} is not installed"
    return (kernel if kernel.available() else None), kernel.reason()


def _check(
    x: Tensor,
    spec: QuantizerSpec,
    along: int,
    carrier: torch.dtype,
    scale: Tensor | None,
    amax: Tensor | None,
    seed: int | None,
) -> None:
    if x.dim() != 2 or not x.is_floating_point():
        raise ValueError(f"cast takes a matrix of floats, got {x.dtype} of shape {list(x.shape)}")
    if along not in (0, 1):
        raise ValueError(f"along is 0 or 1, not {along}")
    if carrier not in CARRIERS:
        raise ValueError(f"carrier is float32 or bfloat16, not {carrier}")
    if scale is not None and (spec.scaling not in ("delayed", "current") or scale.numel() != 1):
        raise ValueError(f"one scale can be given for delayed or current scaling, not for {spec.scaling}")
    if amax is not None and (spec.scaling not in ("delayed", "current", "nvfp4") or amax.numel() != 1):
        raise ValueError(
            f"one amax can be given for delayed, current or nvfp4 scaling, not for {spec.scaling}"
        )
    if spec.rounding == "stochastic" and seed is None:
        raise ValueError("stochastic rounding needs a seed")
