"""What would fit into so much memory: recomputation, ZeRO stage, smaller micro-steps, batch, and what each costs.

    options(spec, vocab_size, limit)     # as it is, every single change, and the cheapest that fit

Costs are those of one step on the rank that has most of each: operations, and bytes sent by ring algorithms. All by
formula.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from harness.ledger.predict import predict_ranks
from harness.ledger.traffic.base import group_size
from harness.spec import RunSpec
from harness.spec.parallelism import DENSE
from suite.declare.feasible import batch_problem
from suite.declare.meshes import mesh_problems, not_carried_out

RECOMPUTE = ("none", "selective", "full")
MOST_DOUBLINGS = 24
MOST_SHOWN = 5
"""Combinations that fit, cheapest first."""


@dataclass(frozen=True)
class Option:
    """One way to train, and how it compares with what was asked."""

    change: str
    """What is other than asked; `as it is` where nothing is."""
    peak_bytes: int
    fits: bool
    flops: float
    """Operations a token over those of what was asked."""
    sent: float | None
    """Bytes sent a token over those of what was asked; None where that sends nothing."""
    sent_bytes: float
    """A step."""


def options(spec: RunSpec, vocab_size: int, limit: int) -> list[Option]:
    """As it is, each single change, and of all combinations that fit the cheapest ones: fewest operations, then
    bytes."""
    base = _cost(spec, vocab_size)

    def option(changes: dict[str, Any]) -> Option | None:
        changed = _changed(spec, changes)
        return None if changed is None else _option(changes, changed, spec, vocab_size, limit, base)

    found = [(changes, made) for changes in _changes(spec) if (made := option(changes)) is not None]
    single = [made for changes, made in found if len(changes) <= 1]
    single += _largest_batch(filter(None, map(option, _batches(spec, single[0].fits))), single[0].fits)
    several = [made for changes, made in found if len(changes) > 1 and made.fits]
    fitting = sorted(several, key=lambda each: (each.flops, each.sent_bytes, each.peak_bytes))
    fitting = _not_worse(fitting, [each for each in single if each.fits])
    return [*single, *fitting[:MOST_SHOWN]]


def _largest_batch(batches: Iterable[Option], grow: bool) -> list[Option]:
    """The last of growing batches that fits, or the first of shrinking ones; none where none does."""
    if not grow:
        return [each for each in batches if each.fits][:1]
    best: list[Option] = []
    for each in batches:
        if not each.fits:
            break
        best = [each]
    return best


def _not_worse(several: Iterable[Option], single: list[Option]) -> list[Option]:
    """Combinations that a single change which fits does not beat in both costs."""
    return [
        each
        for each in several
        if not any(one.flops <= each.flops and one.sent_bytes <= each.sent_bytes for one in single)
    ]


def _changes(spec: RunSpec) -> Iterator[dict[str, Any]]:
    """Fields and their other values; the empty one first."""
    mesh = spec.parallelism
    recompute = [None, *(each for each in RECOMPUTE if each != spec.recompute)]
    zero: list[int | None] = [None]
    if group_size(mesh, DENSE) > 1 and mesh.replicas == 1:
        zero += [stage for stage in (1, 2, 3) if stage != mesh.zero]
    accumulation = [None, *(spec.accumulation * 2**power for power in range(1, 4))]
    parallel = [None, True] if mesh.tp > 1 and not mesh.sequence_parallel else [None]
    names = ("recompute", "zero", "accumulation", "sequence_parallel")
    for values in product(recompute, zero, accumulation, parallel):
        yield {name: value for name, value in zip(names, values, strict=True) if value is not None}


def _batches(spec: RunSpec, grow: bool) -> Iterator[dict[str, Any]]:
    """Batches doubled while there is a doubt, or halved."""
    for power in range(1, MOST_DOUBLINGS):
        if grow:
            yield {"batch_size": spec.batch_size * 2**power}
        elif spec.batch_size % 2**power == 0:
            yield {"batch_size": spec.batch_size // 2**power}


def _changed(spec: RunSpec, changes: dict[str, Any]) -> RunSpec | None:
    """The run with these changes; None where there is none."""
    of_mesh = {name: value for name, value in changes.items() if name in ("zero", "sequence_parallel")}
    mesh = spec.parallelism.model_copy(update=of_mesh)
    others = {name: value for name, value in changes.items() if name not in of_mesh}
    changed = spec.model_copy(update={"parallelism": mesh, **others})
    refused = not_carried_out(changed.model_copy(update={"task": "step"})) if changes else None
    return None if refused or batch_problem(changed) or mesh_problems(changed) else changed


def _cost(spec: RunSpec, vocab_size: int) -> tuple[int, float, float]:
    """(peak bytes, operations a step, bytes sent a step), each of the rank that has most."""
    ranks = predict_ranks(spec, vocab_size)
    sent = max(sum(c.sent_bytes for c in each.collectives) for each in ranks)
    return max(each.total for each in ranks), max(each.flops or 0 for each in ranks), sent


def _option(
    changes: dict[str, Any],
    changed: RunSpec,
    spec: RunSpec,
    vocab_size: int,
    limit: int,
    base: tuple[int, float, float],
) -> Option:
    peak, flops, sent = _cost(changed, vocab_size) if changes else base
    batches = changed.batch_size / spec.batch_size
    return Option(
        change=", ".join(f"{name} {_word(value)}" for name, value in changes.items()) or "as it is",
        peak_bytes=peak,
        fits=peak <= limit,
        flops=flops / base[1] / batches,
        sent=sent / base[2] / batches if base[2] else None,
        sent_bytes=sent,
    )


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
