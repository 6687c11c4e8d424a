"""Which backend runs a recipe on a device, and why. Pure: device and packages come as arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from harness.precision.backends.errors import BackendError
from harness.precision.backends.requirements import Need, Version, joined, native_requirements
from harness.spec import Fidelity, PrecisionSpec

ChosenBackend = Literal["emulated", "torch", "transformer_engine"]

_WHY = {
    "torch": "the casts are the emulation's own, the products PyTorch's scaled ones",
    "transformer_engine": "PyTorch alone has no such product here, Transformer Engine has",
}


@dataclass(frozen=True)
class Choice:
    """A backend, what its numbers are worth, and why it was taken."""

    backend: ChosenBackend
    fidelity: Fidelity
    reason: str
    replaced: tuple[str, ...] = ()
    """Names of the linears it runs, once it is carried out."""
    unfit: tuple[str, ...] = ()
    """Linears that the recipe covers and whose sizes the backend cannot take: they stay unquantised."""


def choose_backend(
    precision: PrecisionSpec,
    device: str,
    capability: Version | None,
    packages: Mapping[str, str],
    excluded: Mapping[str, str] | None = None,
) -> Choice:
    """The backend for `precision` on `device` (cpu, cuda), whose CUDA compute capability is `capability`.

    `packages`: distribution -> version of what is installed, and `cuda` -> the CUDA that PyTorch is built for.
    `excluded`: backend -> why the model cannot use it. Backend auto takes PyTorch's own products where they can run the
    recipe, since casts and statistics are then those of the emulation; else Transformer Engine; else it emulates.
    Raises BackendError where a backend asked for by name cannot be.
    """
    if precision.recipe is None:
        return Choice("torch", "native", f"no recipe: PyTorch's own {precision.compute.upper()} products")
    if precision.backend == "emulated":
        return Choice("emulated", "emulated", "asked for")
    needs = native_requirements(precision)
    named: dict[ChosenBackend, Need | None] = {
        "torch": needs.torch,
        "transformer_engine": needs.transformer_engine,
    }
    problems = {
        name: needs.reason if need is None else need.lacking(device, capability, packages)
        for name, need in named.items()
    }
    for name, why in (excluded or {}).items():
        problems[name] = problems[name] or why  # type: ignore[index]
    if precision.backend != "auto":
        if problem := problems[precision.backend]:
            raise BackendError(
                f"precision {precision.name}: backend {precision.backend} cannot run it: {problem}"
            )
        return Choice(precision.backend, "native", "asked for")
    for name, problem in problems.items():
        if problem is None:
            return Choice(name, "native", _WHY[name])
    if not needs.is_possible:
        return Choice("emulated", "emulated", f"no native form: {needs.reason}")
    missing: dict[str, str | None] = {
        name: problem for name, problem in problems.items() if named[name] is not None
    }
    return Choice("emulated", "emulated", joined(missing))
