"""Groups of a mesh and a rank's share of a batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness.parallel import mesh
from harness.parallel.norm import counts_here
from harness.spec import AXES, ParallelismSpec
from harness.spec.parallelism import DENSE, EXPERT
from tests.harness.parallel.conftest import run_ranks

FOUR: list[dict[str, Any]] = [
    {"dp": 2, "tp": 2},
    {"dp": 2, "cp": 2},
    {"dp": 2, "ep": 2},
    {"pp": 2, "ep": 2},
    {"dp": 4, "zero": 3, "replicas": 2},
]


def groups(spec: ParallelismSpec) -> dict[str, tuple[int, ...]]:
    """Ranks of every group that a run uses."""
    own = mesh.build(spec, dist.get_rank())
    wanted = {axis: (axis,) for axis in AXES if spec.size(axis) > 1}
    if own.size(*DENSE) > 1:
        wanted["dense"] = DENSE
    if own.size(*EXPERT) > 1:
        wanted["expert"] = EXPERT
    found = {name: tuple(dist.get_process_group_ranks(own.group(*axes))) for name, axes in wanted.items()}
    if spec.replicas > 1:
        both = own.shards(*DENSE)
        assert both.mesh_dim_names == ("replicas", "shards")
        found |= {
            name: tuple(dist.get_process_group_ranks(both.get_group(name))) for name in both.mesh_dim_names
        }
    return found


@pytest.mark.parametrize("axes", FOUR, ids=str)
def test_groups_are_those_of_the_specification(axes: dict[str, Any]) -> None:
    spec = ParallelismSpec(**axes)
    for rank, found in enumerate(run_ranks(4, groups, spec)):
        for axis in AXES:
            if spec.size(axis) > 1:
                assert found[axis] == spec.group(rank, (axis,))
                assert mesh.axis_of(spec, found[axis]) == axis
        if "dense" in found:
            assert found["dense"] == spec.group(rank, DENSE)
        if "expert" in found:
            assert found["expert"] == spec.group(rank, EXPERT)
        if spec.replicas > 1:
            assert found["shards"] == ((0, 1), (2, 3))[rank // 2]
            assert found["replicas"] == ((0, 2), (1, 3))[rank % 2]


def test_axis_of_a_joined_group() -> None:
    spec = ParallelismSpec(dp=2, pp=2, cp=2, tp=2)
    assert mesh.axis_of(spec, spec.group(5, ("dp", "cp"))) == "dp+cp"
    assert mesh.axis_of(spec, spec.group(5, AXES)) == "dp+pp+cp+tp"


@pytest.mark.parametrize("axes", [{"dp": 2, "ep": 2, "tp": 2}, {"dp": 4}, {"tp": 2}], ids=str)
def test_shares_put_together_are_the_batch(axes: dict[str, int]) -> None:
    spec = ParallelismSpec(**axes)
    batch = torch.arange(8 * 3).view(8, 3)
    shares = {tuple(mesh.Mesh(spec, rank).share(batch).flatten().tolist()) for rank in range(spec.num_ranks)}
    assert len(shares) == spec.data_shards
    assert sorted(token for share in shares for token in share) == batch.flatten().tolist()


def test_a_batch_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="6 sequences does not divide over 4"):
        mesh.Mesh(ParallelismSpec(dp=4), 0).share(torch.zeros(6, 2))


@pytest.mark.parametrize(
    ("name", "whole", "sharded"),
    [
        ("norm.weight", 1, 2 * 2 * 2),  # over dp, ep and cp
        ("layers.0.ffn.down.weight", 2, 2 * 2 * 2 * 2),  # and over tp, always
        ("layers.0.ffn.experts.down", 2, 2 * 2 * 2),  # over ep always, and over dp and cp
    ],
)
def test_every_part_of_a_gradient_is_counted_once(name: str, whole: int, sharded: int) -> None:
    """On 2^5 ranks. Those of a pipeline hold different parameters: the name stands for one on each of the two."""
    for zero in range(4):
        spec = ParallelismSpec(dp=2, pp=2, ep=2, cp=2, tp=2, zero=zero)
        counted = sum(counts_here(name, mesh.Mesh(spec, rank)) for rank in range(32))
        assert counted == 2 * (whole if zero < 2 else sharded)


def test_hsdp_counts_one_replica() -> None:
    spec = ParallelismSpec(dp=4, zero=3, replicas=2)
    assert [counts_here("norm.weight", mesh.Mesh(spec, rank)) for rank in range(4)] == [
        True,
        True,
        False,
        False,
    ]
