"""Holds a device's own paths against the emulation: casts bit for bit, linears within the error of accumulation.

What needs a GPU to mean anything runs on a CPU as well, so that the checks themselves are tested;
`scripts/gpu_check.sh` runs them on a GPU.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from harness.precision import twin
from harness.precision.backends.apply import apply_backend
from harness.precision.backends.errors import BackendError, NotExpressibleError
from harness.precision.backends.operands import Operand, decoded
from harness.precision.backends.torch_native import ScaledLinear
from harness.precision.cast import dequantize
from harness.precision.linear import Linear, QuantizedLinear, apply_recipe
from harness.precision.noise import noise_seed
from harness.precision.scaling import Quantizer
from harness.spec import PrecisionSpec
from harness.spec.notation import parse_cast
from harness.spec.roles import ALONG, FIRST, GEMMS, ROLES

Status = Literal["ok", "wrong", "skipped"]
TOLERANCE = 0.05
"""Of the largest element: FP8 tensor cores keep about 14 bits of a sum and err by up to 2 % at a contraction of 4096
(DeepSeek-V3, section 3.3), BF16 outputs by 2^-9; a wrong scale or layout errs by 1 and more."""
CASTS = (
    *("e4m3:current", "e4m3:none", "e4m3:row", "e4m3:row:pow2", "e5m2:current", "e5m2:none:special"),
    *("e4m3:block128", "e4m3:block128x128", "e4m3:block128x128:pow2", "e4m3-ieee:current", "e3m2:current"),
    *("mxfp8", "mxfp8:up", "mxfp8:even", "mxfp8-e5m2", "mxfp6", "mxfp6-e2m3", "mxfp4", "mxfp4:2d", "mxint8"),
    *("nvfp4", "nvfp4:2d", "nvfp4:sr", "int8", "int4:group128", "bf16:none:sr", "e4m3:current:sr", "m7"),
)
"""Casts whose kernels are compared with the twin."""
NAME, TOKENS, D_IN, D_OUT = "layers.0.ffn.up", 384, 512, 640


@dataclass(frozen=True)
class Finding:
    """One comparison."""

    check: str
    """casts or paths."""
    name: str
    status: Status
    detail: str
    error: float | None = None
    """Largest difference over the largest element."""
    mismatches: int | None = None
    """Elements that differ in any bit."""


def rough_matrix(rows: int, cols: int, seed: int, device: torch.device) -> Tensor:
    """FP32 with rows of unlike size, zeros, values far below and far above the rest."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, cols, generator=generator) * torch.randn(rows, 1, generator=generator).exp()
    x[0] = 0
    x[1 : rows // 2, : cols // 4] *= 1e-5
    x[rows // 3, cols // 2] = 1e3
    return x.to(device)


# Casts


KERNELS = {"triton": "harness.precision.triton_kernel", "cpp": "harness.precision.kernel.cpu"}


def check_casts(
    words: Iterable[str], device: torch.device, implementation: Literal["triton", "cpp"]
) -> list[Finding]:
    """One finding a cast and dtype: values, factor and amax of a kernel against the twin's, bit for bit."""
    try:
        kernel = importlib.import_module(KERNELS[implementation])
    except ImportError as error:
        return [Finding("casts", implementation, "skipped", f"it cannot be loaded: {error}")]
    if not kernel.available():
        return [Finding("casts", implementation, "skipped", kernel.reason())]
    found = []
    for word in words:
        for dtype in (torch.float32, torch.bfloat16):
            name = f"{word} of {str(dtype).removeprefix('torch.')}"
            num_unlike = _cast_mismatches(word, dtype, device, kernel)
            if num_unlike is None:
                found.append(Finding("casts", name, "skipped", f"{implementation} leaves it to the twin"))
                continue
            status: Status = "wrong" if num_unlike else "ok"
            detail = f"{implementation} against the twin: {num_unlike} elements differ"
            found.append(Finding("casts", name, status, detail, mismatches=num_unlike))
    return found


def _cast_mismatches(word: str, dtype: torch.dtype, device: torch.device, kernel: Any) -> int | None:
    """None where the kernel does not cover the cast."""
    spec = parse_cast(word)
    total = 0
    for rows, cols, along in ((257, 640, 1), (257, 640, 0), (96, 1000, 1), (48, 32, 1)):
        x = rough_matrix(rows, cols, rows + along, device).to(dtype)
        given: dict[str, Any] = {
            "along": along,
            "carrier": torch.float32,
            "scale": None,
            "amax": None,
            "seed": noise_seed(0, 1, word) if spec.rounding == "stochastic" else None,
            "collect": False,
            "dequantized": False,
        }
        mine, twins = kernel.cast_tensor(x, spec, **given), twin.cast_tensor(x, spec, **given)
        if mine is None:
            return None
        for one, other in (
            (mine.values, twins.values),
            (mine.inverse, twins.inverse),
            (mine.amax, twins.amax),
        ):
            total += _num_unlike(one, other)
    return total


def _num_unlike(one: Tensor | None, other: Tensor | None) -> int:
    """Elements that differ in value or in the sign of zero; two NaN are alike. A missing tensor is all unlike."""
    if one is None or other is None:
        return 0 if one is other else 1
    same = (one == other) & (torch.signbit(one) == torch.signbit(other)) | (one.isnan() & other.isnan())
    return int((~same).sum())


# Linears


Apply = Callable[[nn.Module, PrecisionSpec], object]


def check_path(precision: PrecisionSpec, device: torch.device, apply: Apply | None = None) -> Finding:
    """A linear on `precision.backend`'s own products against the emulated one: operands and the three products.

    `apply` puts the native linear into a model; not given, the backend does it if the device can.
    """
    put = apply or (lambda model, spec: apply_backend(model, spec, device))
    name = f"{precision.name} on {precision.backend}"
    native, emulated = _model(device), _model(device)
    try:
        put(native, precision)
    except (BackendError, NotExpressibleError) as error:
        return Finding("paths", name, "skipped", str(error))
    layer = native.get_submodule(NAME)
    if type(layer) in (Linear, QuantizedLinear):
        return Finding("paths", name, "skipped", "the recipe leaves this linear to no native product")
    apply_recipe(emulated, precision.model_copy(update={"backend": "emulated"}))
    num_unlike = _operand_mismatches(layer, precision, device) if isinstance(layer, ScaledLinear) else None
    errors = {
        what: float((mine.double() - theirs.double()).abs().max() / theirs.double().abs().max())
        for what, mine, theirs in zip(
            ("y", "dx", "dw"), _products(native, device), _products(emulated, device), strict=True
        )
    }
    worst = max(errors, key=lambda what: errors[what] if errors[what] == errors[what] else float("inf"))
    status: Status = "ok" if errors[worst] <= TOLERANCE and not num_unlike else "wrong"
    operands = "operands not visible" if num_unlike is None else f"{num_unlike} operand elements differ"
    detail = f"{operands}; largest error {errors[worst]:.2g} of the largest element, in {worst}"
    return Finding("paths", name, status, detail, errors[worst], num_unlike)


class _OneLinear(nn.Module):
    """Runs whatever stands in the linear's place by then."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.get_submodule(NAME)(x)
        return y


def _model(device: torch.device) -> nn.Module:
    """One linear under the name of a hidden layer's; the same weights every time."""
    model = _OneLinear()
    home: nn.Module = model
    *parents, last = NAME.split(".")
    for part in parents:
        child = nn.Module()
        home.add_module(part, child)
        home = child
    linear = Linear(D_IN, D_OUT, bias=False)
    with torch.no_grad():
        linear.weight.copy_(rough_matrix(D_OUT, D_IN, 1, torch.device("cpu")) * 0.02)
    home.add_module(last, linear)
    return model.to(device)


def _products(model: nn.Module, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """y, dx and dw of the same input and output gradient."""
    x = rough_matrix(TOKENS, D_IN, 2, device).bfloat16().requires_grad_()
    y: Tensor = model(x)
    y.backward(rough_matrix(TOKENS, D_OUT, 3, device).to(y.dtype) * 1e-3)
    weight = model.get_submodule(NAME).weight
    assert x.grad is not None and isinstance(weight, Tensor) and weight.grad is not None
    return y.detach(), x.grad, weight.grad


def _operand_mismatches(layer: ScaledLinear, precision: PrecisionSpec, device: torch.device) -> int:
    """Elements of the native operands of all three products that the emulation's casts do not give."""
    tensors = {
        "activations": rough_matrix(TOKENS, D_IN, 2, device).bfloat16(),
        "weights": layer.weight.detach(),
        "gradients": rough_matrix(TOKENS, D_OUT, 3, device).bfloat16(),
    }
    total = 0
    for gemm in GEMMS:
        for role, along in zip(ROLES[gemm], ALONG[gemm], strict=True):
            # Linears of their own, since a cast moves a history on.
            mine, theirs = (QuantizedLinear(layer, precision, NAME) for _ in range(2))
            native = ScaledLinear(mine, precision, NAME, 0)
            side = native.side(gemm, role, tensors[role])
            if not isinstance(side, Operand):
                continue
            home = theirs if gemm == FIRST[role] or theirs.shared[role] else getattr(theirs, gemm)
            quantizer = getattr(home, role)
            assert isinstance(quantizer, Quantizer)
            wanted = dequantize(quantizer.cast(tensors[role], along, torch.float32))
            total += _num_unlike(decoded(side), wanted if along == 1 else wanted.t())
    return total
