"""The global gradient norm of a model in parts: every element counted once, whoever holds copies of it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from harness.parallel.mesh import Mesh
from harness.parallel.tensor import is_cut
from harness.spec import Axis
from harness.spec.parallelism import DENSE


def axes_of(name: str, mesh: Mesh) -> set[Axis]:
    """Axes along which the ranks hold different parts of the gradient of a parameter."""
    spec = mesh.spec
    apart: set[Axis] = {"pp"}
    if is_cut(name):
        apart.add("tp")
    expert = is_expert(name) and spec.ep > 1
    if expert:
        apart.add("ep")
    if spec.zero >= 2:
        apart |= {"dp", "cp"} if expert else set(DENSE)
    return apart


def is_expert(name: str) -> bool:
    """Whether a parameter belongs to the experts that ep shares out."""
    return ".experts." in name


def counts_here(name: str, mesh: Mesh) -> bool:
    """Whether this rank's part of a gradient enters the norm: of several that hold the same, the first does."""
    apart = axes_of(name, mesh)
    for axis, at in mesh.place.items():
        if axis == "dp" and "dp" in apart:
            at //= mesh.spec.dp // mesh.spec.replicas  # HSDP: replicas hold the same shards
        elif axis in apart:
            continue
        if at:
            return False
    return True


def squared_norm(gradients: Iterable[tuple[str, Tensor]], mesh: Mesh) -> Tensor:
    """Sum of squares of this rank's share of (name, local gradient), FP64; the sum over all ranks is the squared
    norm."""
    counted = [gradient for name, gradient in gradients if gradient.numel() and counts_here(name, mesh)]
    if not counted:
        return torch.zeros((), dtype=torch.float64)
    norms: list[Tensor] = list(torch._foreach_norm(counted))
    return torch.stack([norm.double() for norm in norms]).square().sum()
