"""What it takes to run a recipe natively: compute capability, CUDA, packages; or why it cannot be at all.

Sources: `aten/src/ATen/native/cuda/ScaledBlas.cpp` of PyTorch for its scaled products (per tensor and per row from
8.9, 1x128 and 128x128 blocks on 9.x with cuBLASLt 12.9; no product of two E5M2 operands, E4M3 alone for blocks and MX,
E4M3 on the right for scales per row), cuBLAS for the block-scaled ones of Blackwell, and
`transformer_engine/pytorch/quantization.py` for Transformer Engine's (FP8 from 8.9, blocks from 9.0 with CUDA 12.9,
MXFP8 from 10.0 and below 12.0, NVFP4 from 10.0). Read in July to October 2026's versions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from harness.precision.backends.errors import ACCUMULATION, NotExpressibleError
from harness.precision.backends.te_recipe import te_recipe
from harness.spec import PrecisionSpec, QuantizerSpec, RecipeSpec

Version = tuple[int, int]
Scheme = Literal["tensor", "row", "block", "mx", "nvfp4"]
DISTRIBUTION = "lowprec-suite"


@dataclass(frozen=True)
class Need:
    """What a backend needs for a recipe."""

    capability: Version | None = None
    """CUDA compute capability from which on; None: any device will do."""
    below: Version | None = None
    """First compute capability that it does not run on any more."""
    cuda: Version | None = None
    package: str = "torch"
    version: Version = (2, 11)
    extra: str | None = None
    """Extra of the suite that brings the package."""

    def __str__(self) -> str:
        parts = []
        if self.capability is not None:
            parts.append(f"compute capability {_range(self.capability, self.below)}")
        if self.cuda is not None:
            parts.append(f"CUDA {_dotted(self.cuda)}")
        if self.extra is not None:
            parts.append(f"{self.package} {_dotted(self.version)}")
        return ", ".join(parts) or "any device"

    def lacking(self, device: str, capability: Version | None, packages: Mapping[str, str]) -> str | None:
        """What is missing, in words, or None. `packages`: distribution -> version, and `cuda` -> that of PyTorch."""
        if self.capability is not None:
            needs = f"compute capability {_range(self.capability, self.below)} is needed"
            if device != "cuda" or capability is None:
                return f"{needs}, the device is {'a CPU' if device == 'cpu' else f'{device} without one'}"
            if "cuda" not in packages:
                return f"{needs}, this PyTorch is built without CUDA"
            if capability < self.capability or (self.below is not None and capability >= self.below):
                return f"{needs}, the device has {_dotted(capability)}"
        for name, least in ((self.package, self.version), ("cuda", self.cuda)):
            if least is None:
                continue
            found = packages.get(name)
            remedy = f" (pip install '{DISTRIBUTION}[{self.extra}]')" if self.extra and name != "cuda" else ""
            if found is None:
                return f"{name} is not installed{remedy}"
            if parse_version(found) < least:
                return f"{name} {_dotted(least)} or newer is needed, {found} is installed{remedy}"
        return None


@dataclass(frozen=True)
class Requirements:
    """What each native backend needs for one precision; None where it has no form of it, and `reason` says why."""

    torch: Need | None
    transformer_engine: Need | None
    reason: str = ""

    @property
    def is_possible(self) -> bool:
        return self.torch is not None or self.transformer_engine is not None

    def __str__(self) -> str:
        """One line for tables."""
        named = (("torch", self.torch), ("transformer_engine", self.transformer_engine))
        parts = [f"{name}: {need}" for name, need in named if need is not None]
        if not parts:
            return f"none: {self.reason}"
        return "; ".join(parts) + (f" ({self.reason})" if self.torch == Need() and self.reason else "")


TENSOR_CORES = {"fp16": (7, 0), "bf16": (8, 0)}
"""Compute capability from which tensor cores multiply what a precision without a recipe computes in."""

TORCH_NEEDS: dict[Scheme, Need] = {
    "tensor": Need((8, 9)),
    "row": Need((8, 9)),
    "block": Need((9, 0), (10, 0), (12, 9)),
    "mx": Need((10, 0), (12, 0), (12, 8)),
    "nvfp4": Need((10, 0), (12, 0), (12, 8)),
}
TE_NEEDS: dict[str, Need] = {
    class_name: Need(capability, below, cuda, "transformer-engine", (2, 9), "te")
    for class_name, (capability, below, cuda) in {
        "DelayedScaling": ((8, 9), None, None),
        "Float8CurrentScaling": ((8, 9), None, None),
        "Float8BlockScaling": ((9, 0), None, (12, 9)),
        "MXFP8BlockScaling": ((10, 0), (12, 0), None),
        "NVFP4BlockScaling": ((10, 0), None, None),
    }.items()
}


def native_requirements(precision: PrecisionSpec) -> Requirements:
    """What native execution of `precision` needs."""
    recipe = precision.recipe
    if recipe is None:
        cores = TENSOR_CORES.get(precision.compute)
        reason = f"tensor cores from compute capability {_dotted(cores)} on" if cores else ""
        return Requirements(Need(), None, reason)
    if precision.compute != "bf16":
        return Requirements(
            None,
            None,
            f"native products of narrow formats come out in BF16, this precision computes in {precision.compute}",
        )
    problems, torch_need, te_need = [], None, None
    try:
        torch_need = _torch_need(recipe)
    except NotExpressibleError as error:
        problems.append(str(error))
    try:
        planned = te_recipe(recipe)
        te_need = TE_NEEDS[planned.class_name]
        if (
            planned.attributes
        ):  # FP32 scales of blocks: on Blackwell TE puts blocks on MX products, whose scales are powers
            te_need = replace(te_need, below=(10, 0))
    except NotExpressibleError as error:
        problems.append(str(error))
    return Requirements(torch_need, te_need, "; ".join(dict.fromkeys(problems)))


def gemm_scheme(left: QuantizerSpec | None, right: QuantizerSpec | None) -> Scheme | None:
    """How `torch.nn.functional.scaled_mm` would take these operands; None for a GEMM without quantised ones.

    Raises NotExpressibleError where PyTorch has no such product.
    """
    if left is None and right is None:
        return None
    if left is None or right is None:
        raise NotExpressibleError("PyTorch has no product of a quantised and an unquantised operand")
    schemes = {scheme_of(spec) for spec in (left, right)}
    if schemes == {"tensor", "row"}:
        schemes = {"row"}  # one scale repeated for all rows
    if len(schemes) > 1:
        raise NotExpressibleError(f"PyTorch has no product of {left.scaling} and {right.scaling} scaling")
    (scheme,) = schemes
    if {left.format, right.format} == {"e5m2"}:
        raise NotExpressibleError("PyTorch multiplies no two E5M2 operands")
    if scheme in ("block", "mx") and {left.format, right.format} != {"e4m3"}:
        raise NotExpressibleError(f"PyTorch's {scheme}-scaled products take E4M3 on both sides")
    if scheme == "row" and right.format != "e4m3":
        raise NotExpressibleError("PyTorch's row-scaled products take E4M3 on the right")
    if scheme == "block" and (left.block_shape, right.block_shape) == ((128, 128), (128, 128)):
        raise NotExpressibleError("PyTorch multiplies no two operands with 128x128 blocks")
    return scheme


# MXFP4 products exist in builds of PyTorch for AMD or with MSLK alone, so they count as absent.
_BLOCKS: dict[str, tuple[Scheme, tuple[str, ...], tuple[tuple[int, int], ...]]] = {
    "block": ("block", ("e4m3", "e5m2"), ((1, 128), (128, 128))),
    "mx": ("mx", ("e4m3", "e5m2"), ((1, 32), (32, 32))),
    "nvfp4": ("nvfp4", ("e2m1",), ((1, 16), (16, 16))),
}


def scheme_of(spec: QuantizerSpec) -> Scheme:
    """How an operand cast so is scaled. Raises NotExpressibleError where no product takes it."""
    if spec.keep_top:
        raise NotExpressibleError("no GEMM keeps a block's largest values unquantised")
    if spec.scaling in ("block", "mx", "nvfp4"):
        scheme, formats, shapes = _BLOCKS[spec.scaling]
        if spec.block_shape not in shapes:
            raise NotExpressibleError(f"PyTorch's {spec.scaling} products have no blocks {spec.block_shape}")
    else:
        scheme, formats = ("row" if spec.scaling == "row" else "tensor"), ("e4m3", "e5m2")
    if spec.format not in formats:
        raise NotExpressibleError(
            f"PyTorch's {spec.scaling}-scaled products take {' and '.join(formats)}, not {spec.format}"
        )
    return scheme


def _torch_need(recipe: RecipeSpec) -> Need:
    if recipe.accumulation is not None:
        raise NotExpressibleError(ACCUMULATION)
    schemes = {gemm_scheme(*recipe.operands(gemm)) for gemm in ("forward", "dgrad", "wgrad")} - {None}
    if not schemes:
        raise NotExpressibleError("no GEMM of the recipe is quantised")
    needs = [TORCH_NEEDS[scheme] for scheme in schemes if scheme is not None]
    return Need(
        max(need.capability for need in needs if need.capability is not None),
        min((need.below for need in needs if need.below is not None), default=None),
        max((need.cuda for need in needs if need.cuda is not None), default=None),
    )


def parse_version(text: str) -> Version:
    """(major, minor) of a version; (0, 0) for what is none."""
    numbers = text.split("+")[0].split(".")[:2]
    try:
        return int(numbers[0]), int(numbers[1]) if len(numbers) > 1 else 0
    except ValueError:
        return 0, 0


def joined(problems: Mapping[str, str | None]) -> str:
    """Backends' problems in one text, a problem that several share said once."""
    sharing: dict[str, list[str]] = {}
    for name, problem in problems.items():
        if problem:
            sharing.setdefault(problem, []).append(name)
    return "; ".join(f"{' and '.join(names)}: {problem}" for problem, names in sharing.items())


def _dotted(version: Version | None) -> str:
    return ".".join(map(str, version or ()))


def _range(least: Version, below: Version | None) -> str:
    if below is None:
        return f"{_dotted(least)} or above"
    return f"{least[0]}.x" if below == (least[0] + 1, 0) else f"{_dotted(least)} to {below[0] - 1}.x"
