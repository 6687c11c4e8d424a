"""Which device has the hardware's own path for a kernel. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping

from harness.precision.backends.requirements import TORCH_NEEDS, Need, Version, scheme_of
from harness.spec.gemm import KERNELS, KernelName
from harness.spec.notation import parse_cast


def needs(name: KernelName) -> Need | None:
    """What a kernel takes; None where any device will do, a CPU among them."""
    casts = KERNELS[name].casts
    return None if casts is None else TORCH_NEEDS[scheme_of(parse_cast(casts[0]))]


def lacking(
    name: KernelName, device: str, capability: Version | None, packages: Mapping[str, str]
) -> str | None:
    """Why `device` (cpu or cuda, of `capability`) has no such path; None where it has one.

    `packages`: distribution -> version, and `cuda` -> that of PyTorch.
    """
    need = needs(name)
    reason = need.lacking(device, capability, packages) if need is not None else None
    if reason is None:
        return None
    rest = "; such a product would be an emulation, whose speed says nothing" if device == "cpu" else ""
    return f"{name}: {reason}{rest}"
