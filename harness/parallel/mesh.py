"""The mesh of a run: ranks on the axes dp pp ep cp tp, the groups that its parts communicate in, a rank's share of a
batch.

Axes of size 1 are left out of the DeviceMesh. Dense parameters are shared over the ranks of dp · ep · cp, one group
that reads `dp+ep+cp` in records; those of an expert over dp · cp.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from harness.spec import AXES, Axis, ParallelismSpec

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


@dataclass
class Mesh:
    """One rank's view of the mesh."""

    spec: ParallelismSpec
    rank: int
    device_type: str = "cpu"
    devices: DeviceMesh | None = None
    """Over the axes of more than one rank, in the order of AXES; None for one rank."""
    _joined: dict[tuple[Axis, ...], DeviceMesh] = field(default_factory=dict, init=False)
    _sharded: dict[tuple[Axis, ...], DeviceMesh] = field(default_factory=dict, init=False)

    @property
    def place(self) -> dict[Axis, int]:
        """Axis -> this rank's coordinate."""
        return self.spec.place(self.rank)

    def size(self, *axes: Axis) -> int:
        """Ranks of the group over these axes."""
        size = 1
        for axis in axes:
            size *= self.spec.size(axis)
        return size

    def over(self, *axes: Axis) -> DeviceMesh:
        """The 1-D mesh of the ranks that differ along these axes alone; they have more than one rank between them."""
        wide = tuple(axis for axis in AXES if axis in axes and self.spec.size(axis) > 1)
        if wide not in self._joined:
            assert self.devices is not None, f"one rank has no mesh over {axes}"
            part = self.devices[wide if len(wide) > 1 else wide[0]]
            self._joined[wide] = part if len(wide) == 1 else part._flatten("_".join(wide))
        return self._joined[wide]

    def group(self, *axes: Axis) -> ProcessGroup:
        """The process group over these axes."""
        return self.over(*axes).get_group()

    def shards(self, *axes: Axis) -> DeviceMesh:
        """What FSDP2 shards parameters shared over `axes` on: 1-D, or replicas x shards for HSDP."""
        if self.spec.replicas == 1:
            return self.over(*axes)
        wide = tuple(axis for axis in AXES if axis in axes and self.spec.size(axis) > 1)
        if wide not in self._sharded:
            self._sharded[wide] = _replicated(self, wide)
        return self._sharded[wide]

    def share(self, batch: Tensor) -> Tensor:
        """This rank's rows of a batch [batch, tokens], contiguous; contexts cut the tokens later."""
        shards = self.spec.data_shards
        if len(batch) % shards:
            raise ValueError(f"a batch of {len(batch)} sequences does not divide over {shards} data shards")
        place = self.place
        rows = len(batch) // shards
        first = (place["dp"] * self.spec.ep + place["ep"]) * rows
        return batch[first : first + rows]


def build(spec: ParallelismSpec, rank: int, device_type: str = "cpu") -> Mesh:
    """The mesh of this rank; the default process group is there, and all ranks call this together."""
    if spec.num_ranks == 1:
        return Mesh(spec, rank, device_type)
    from torch.distributed.device_mesh import init_device_mesh

    wide = [axis for axis in AXES if spec.size(axis) > 1]
    devices = init_device_mesh(
        device_type, tuple(spec.size(axis) for axis in wide), mesh_dim_names=tuple(wide)
    )
    return Mesh(spec, rank, device_type, devices)


def _replicated(mesh: Mesh, wide: tuple[Axis, ...]) -> DeviceMesh:
    """replicas x shards: dp's outer part against its inner part and the other axes."""
    joined = mesh.over(*wide)
    unflattened: Any = joined._unflatten(
        0, (mesh.spec.replicas, joined.size() // mesh.spec.replicas), ("replicas", "shards")
    )
    return unflattened  # type: ignore[no-any-return]


@cache
def axis_of(spec: ParallelismSpec, group: tuple[int, ...]) -> str:
    """The axes along which a group's ranks differ, joined by +: `tp`, `dp+cp`. HSDP's two groups both lie in dp."""
    places = [spec.place(rank) for rank in group]
    return "+".join(axis for axis in AXES if len({place[axis] for place in places}) > 1) or "one"


def device_of(mesh: Mesh) -> torch.device:
    """The device this rank computes on."""
    import torch

    if mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(mesh.device_type)
