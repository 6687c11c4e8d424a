"""What this machine runs natively, by family of recipes, and what casts on its CPU. Torch stays unloaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from harness.precision.backends.packages import installed
from harness.precision.backends.requirements import Need, Version, joined, native_requirements, parse_version
from harness.precision.kernel import build
from harness.spec import PrecisionSpec, RecipeSpec
from harness.spec.notation import parse_cast

FAMILIES = {
    "FP8 per tensor": ("e4m3:current", "e4m3:current"),
    "FP8 per row": ("e4m3:row", "e4m3:row"),
    "FP8 1x128 blocks": ("e4m3:block128:pow2", "e4m3:block128x128:pow2"),
    "MXFP8": ("mxfp8:up", "mxfp8:up"),
    "NVFP4": ("nvfp4", "nvfp4"),
}
"""Family -> casts of activations and gradients, and of weights, of a recipe that stands for it."""


class Family(NamedTuple):
    """One family on this machine."""

    name: str
    backends: tuple[str, ...]
    """Those that run it here."""
    missing: str
    """What the others need, or nothing."""


def families(capability: Version | None, packages: Mapping[str, str] | None = None) -> Iterator[Family]:
    """Every family, for a GPU of this compute capability (None: no GPU)."""
    packages = installed() if packages is None else packages
    device = "cpu" if capability is None else "cuda"
    for name, (activations, weights) in FAMILIES.items():
        cast = parse_cast(activations)
        recipe = RecipeSpec(activations=cast, weights=parse_cast(weights), gradients=cast)
        needs = native_requirements(PrecisionSpec(name=name, compute="bf16", recipe=recipe))
        named: dict[str, Need | None] = {"torch": needs.torch, "transformer_engine": needs.transformer_engine}
        problems = {
            backend: need.lacking(device, capability, packages)
            for backend, need in named.items()
            if need is not None
        }
        yield Family(
            name,
            tuple(backend for backend, problem in problems.items() if problem is None),
            joined(problems),
        )


def read_capability(text: str) -> Version | None:
    """`9.0` as nvidia-smi prints it -> (9, 0); None for what is no number."""
    version = parse_version(text)
    return version if version > (0, 0) else None


def cast_kernel() -> tuple[bool, str]:
    """(whether there can be a compiled cast kernel, in which state it is). Nothing is compiled for it."""
    try:
        compiler = build.find_compiler()
        path = build.library_path(compiler)
    except build.BuildError as error:
        return False, str(error)
    if path.is_file():
        return True, f"compiled: {path}"
    return True, f"{compiler[0]} compiles it into {path.parent} when the first cast is made"
