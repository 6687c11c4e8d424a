"""The possible mesh that changes least of one that is not.

    nearest_mesh(spec, spec.parallelism.num_ranks)

Every way to spread the ranks over the axes is tried, and at each what else the mesh says may give way: microbatches,
stages a rank, schedule, ZeRO stage, sequence parallelism. A doubling or halving of an axis counts 1,
one that was not there before a half more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import Any

from harness.spec import RunSpec
from harness.spec.parallelism import AXES, Axis, ParallelismSpec
from suite.declare.meshes import mesh_problems, not_carried_out

Sizes = tuple[int, ...]
"""Ranks on each of AXES."""
_PREFERRED: tuple[Axis, ...] = ("dp", "tp", "pp", "cp", "ep")
"""Where two meshes are as near: the one with more ranks on the axis that stands first."""
_COST: dict[str, float] = {
    "microbatches": 0.25,
    "replicas": 0.5,
    "stages_per_rank": 0.5,
    "sequence_parallel": 0.5,
    "schedule": 0.75,
    "zero": 0.75,
}
"""What it counts to change a field that is no axis."""
_NEW_AXIS = 0.5
_MOST_MICROBATCHES = 256
_TRIED_MICROBATCHES = 4


def nearest_mesh(spec: RunSpec, ranks: int) -> ParallelismSpec | None:
    """A mesh of `ranks` that `spec` can be laid over, with as little changed as possible; None where there is none.

    It is one that the suite trains, unless it does not train what was asked either.
    """
    wanted = spec.parallelism
    refused = not_carried_out(spec) is not None
    at = tuple(wanted.size(axis) for axis in AXES)
    found: list[tuple[float, tuple[int, ...], dict[Any, Any]]] = []
    for sizes in _spreads(ranks, len(AXES)):
        named = dict(zip(AXES, sizes, strict=True))
        distance = sum(_moved(new, old) for new, old in zip(sizes, at, strict=True))
        order = tuple(-named[axis] for axis in _PREFERRED)
        for changes in _changes(spec, named, sizes == at):
            cost = sum(_cost(name, value, wanted) for name, value in changes.items())
            found.append((round(distance + cost, 6), order, {**named, **changes}))
    for _, _, fields in sorted(found, key=lambda each: each[:2]):
        mesh = wanted.model_copy(update={**fields, "name": "custom", "ranks": 0})
        changed = spec.model_copy(update={"parallelism": mesh})
        if _is_whole(mesh) and not mesh_problems(changed) and (refused or not not_carried_out(changed)):
            return mesh
    return None


def mesh_text(mesh: ParallelismSpec) -> str:
    """The mesh as a case may write it: `{dp: 2, zero: 3}`, or `single`."""
    fields = mesh.model_dump(exclude_defaults=True, exclude={"name", "ranks"})
    words = {True: "true", False: "false"}
    inner = ", ".join(
        f"{name}: {words[value] if isinstance(value, bool) else value}" for name, value in fields.items()
    )
    return f"{{{inner}}}" if inner else "single"


@cache
def _spreads(ranks: int, axes: int) -> tuple[Sizes, ...]:
    """All ways to write `ranks` as a product of `axes` factors, in order."""
    if axes == 1:
        return ((ranks,),)
    return tuple((d, *rest) for d in _divisors(ranks) for rest in _spreads(ranks // d, axes - 1))


def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def _changes(spec: RunSpec, sizes: dict[Axis, int], same: bool) -> Iterator[dict[str, Any]]:
    """What else may change with the axes: what these sizes make meaningless must, the rest may.

    On the axes as they were every combination is tried, elsewhere only other microbatches and plain 1F1B.
    """
    mesh = spec.parallelism
    must: dict[str, Any] = {}
    if mesh.sequence_parallel and sizes["tp"] == 1:
        must["sequence_parallel"] = False
    if mesh.replicas > 1 and (sizes["dp"] % mesh.replicas or mesh.zero < 2):
        must["replicas"] = 1
    if sizes["pp"] == 1:
        yield {**must, **_differing({"microbatches": 0, "stages_per_rank": 0, "schedule": "1f1b"}, mesh)}
        pipelines: list[dict[str, Any]] = [{}]
    else:
        pipelines = _pipelines(spec, sizes, same)
        yield from ({**must, **each} for each in pipelines)
    if not same:
        return
    for zero, parallel in product((mesh.zero, 2, 3, 0, 1), {mesh.sequence_parallel, False}):
        given = _differing({"zero": zero, "sequence_parallel": parallel}, mesh)
        if given:
            yield from ({**must, **given, **each} for each in pipelines)


def _pipelines(spec: RunSpec, sizes: dict[Axis, int], same: bool) -> list[dict[str, Any]]:
    mesh = spec.parallelism
    counts = _counts(
        spec.batch_size // (sizes["dp"] * sizes["ep"] * spec.accumulation), mesh.num_microbatches
    )
    stages = [mesh.stages_per_rank, *(n for n in (0, 1, 2) if n != mesh.stages_per_rank)]
    schedules = [mesh.schedule, *(["1f1b"] if mesh.schedule != "1f1b" else [])]
    found = []
    for schedule, local, count in product(schedules, stages if same else stages[:2], [None, 0, *counts]):
        changes: dict[str, Any] = {"schedule": schedule, "stages_per_rank": local}
        if count is not None:
            changes["microbatches"] = count
        found.append(_differing(changes, mesh))
    return found


@cache
def _counts(share: int, wanted: int) -> tuple[int, ...]:
    """The divisors of a data shard's sequences that are nearest to the microbatches wanted."""
    divisors = [m for m in range(1, min(share, _MOST_MICROBATCHES) + 1) if share % m == 0]
    return tuple(sorted(divisors, key=lambda m: abs(math.log2(m / wanted)))[:_TRIED_MICROBATCHES])


def _differing(fields: dict[str, Any], mesh: ParallelismSpec) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value != getattr(mesh, name)}


def _moved(new: int, old: int) -> float:
    return abs(math.log2(new / old)) + (_NEW_AXIS if old == 1 < new else 0.0)


def _cost(name: str, value: Any, wanted: ParallelismSpec) -> float:
    cost = _COST[name]
    if name == "microbatches" and value and wanted.num_microbatches:
        cost += 0.1 * abs(math.log2(value / wanted.num_microbatches))
    return cost


def _is_whole(mesh: ParallelismSpec) -> bool:
    """Whether it is one by its own rules: a copy is not checked as it is made."""
    try:
        ParallelismSpec.model_validate(mesh.model_dump())
    except ValueError:
        return False
    return True
