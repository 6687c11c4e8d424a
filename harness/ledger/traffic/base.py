"""One kind of collective in a rank's step, with the formula it came from: what `suite ledger --explain` prints."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from harness.ledger.step import Collective, Op
from harness.spec.parallelism import AXES, Axis, ParallelismSpec


@dataclass(frozen=True)
class Traffic:
    """Calls of one kind and one purpose."""

    name: str
    """What is exchanged."""
    axis: str
    op: Op
    group_size: int
    count: int
    num_bytes: int
    """Payload of all calls, by the rule of harness.ledger.step.Collective."""
    formula: str
    """Bytes in symbols, as harness.ledger.communication defines them."""
    numbers: str
    """The same with this rank's numbers."""


def calls(name: str, axis: str, op: Op, group_size: int, *, calls: int, **factors: int) -> Traffic:
    """`calls` equal calls, each of as many bytes as the product of the named factors."""
    num_bytes = calls
    for factor in factors.values():
        num_bytes *= factor
    symbols = " ".join(name.rstrip("_") for name in factors)
    numbers = " · ".join(f"{factor:,}" for factor in factors.values())
    return Traffic(
        name, axis, op, group_size, calls, num_bytes, f"calls · {symbols}", f"{calls:,} · {numbers}"
    )


def axis_name(mesh: ParallelismSpec, axes: Iterable[Axis]) -> str:
    """Axes of more than one rank joined by +, outermost first, as records name them."""
    wanted = set(axes)
    return "+".join(axis for axis in AXES if axis in wanted and mesh.size(axis) > 1)


def group_size(mesh: ParallelismSpec, axes: Iterable[Axis]) -> int:
    """Ranks of the group over these axes."""
    size = 1
    for axis in axes:
        size *= mesh.size(axis)
    return size


def summed(parts: Iterable[Traffic]) -> tuple[Collective, ...]:
    """All calls of one axis and operation together, in the order of their names."""
    found: dict[tuple[str, str], Collective] = {}
    for part in parts:
        before = found.get((part.axis, part.op))
        count, num_bytes = (before.count, before.num_bytes) if before else (0, 0)
        found[part.axis, part.op] = Collective(
            part.axis,
            part.op,
            part.count + count,
            part.num_bytes + num_bytes,
            before.group_size if before else part.group_size,
        )
    return tuple(found[key] for key in sorted(found))
