"""Tokens sent to experts on other ranks and back: harness.parallel.experts, to the byte.

    T   tokens of a micro-step (or microbatch) on a rank, each for k experts        E   experts of a layer
    R   pairs of token and expert that come to the rank's experts

    counts      all_to_all 8 E                  forward
    dispatch    all_to_all T k h e              forward; R h e backward
    combine     all_to_all R h e                forward; T k h e backward
    aux loss    all_reduce 8 E, over dp+ep+cp   forward

How many come depends on the router: without counted ones R = T k, uniform routing, which is an assumption. Over all
ranks of ep the R add up to the T k whatever it does. Full recomputation runs the forward part again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from harness.ledger.placement import stages
from harness.ledger.traffic.base import Traffic, axis_name, calls, group_size
from harness.ledger.traffic.tensor import read_bytes
from harness.ledger.widths import widths
from harness.spec import RunSpec
from harness.spec.parallelism import DENSE

INT64 = 8


@dataclass(frozen=True)
class Routing:
    """Pairs of token and expert of one rank in one step, all its layers and micro-steps together, a forward pass
    counted once."""

    sent: int
    """Those of its own tokens: T k each time, less what capacity dropped."""
    received: int
    """Those that came to its experts, its own included."""


def uniform(spec: RunSpec, vocab_size: int | None, rank: int) -> Routing:
    """Every expert of the layer gets as many pairs."""
    model = spec.model
    assert model.moe is not None
    size = widths(spec, vocab_size)
    pairs = size.n * model.moe.top_k
    if model.moe.capacity_factor:
        most = math.ceil(model.moe.capacity_factor * size.s * model.moe.top_k / model.moe.experts)
        pairs = min(pairs, size.b * most * model.moe.experts)
    pairs *= _passes(spec, rank)
    return Routing(pairs, pairs)


def experts(
    spec: RunSpec, vocab_size: int | None, rank: int, routing: Routing | None = None
) -> Iterator[Traffic]:
    """Tokens, their outputs and gradients in one rank's step."""
    mesh, moe = spec.parallelism, spec.model.moe
    if moe is None or mesh.num_ranks == 1:
        return
    passes, times = _passes(spec, rank), 2 if spec.recompute == "full" else 1
    dense = group_size(mesh, DENSE)
    if moe.aux_loss and dense > 1:
        name = "load of experts, for the auxiliary loss"
        axis = axis_name(mesh, DENSE)
        yield calls(name, axis, "all_reduce", dense, calls=times * passes, E=moe.experts, e=INT64)
    if mesh.ep == 1:
        return
    found = routing or uniform(spec, vocab_size, rank)
    size = widths(spec, vocab_size)
    read, made = read_bytes(spec, size), size.e_c
    yield calls("counts of tokens", "ep", "all_to_all", mesh.ep, calls=times * passes, E=moe.experts, e=INT64)
    for name, pairs, count, each in (
        ("tokens to experts", found.sent, times * passes, read),
        ("outputs of experts", found.received, times * passes, made),
        ("gradients of tokens", found.received, passes, read),
        ("gradients of outputs", found.sent, passes, made),
    ):
        again = count // passes
        yield Traffic(
            name=name,
            axis="ep",
            op="all_to_all",
            group_size=mesh.ep,
            count=count,
            num_bytes=again * pairs * size.h * each,
            formula="times · pairs h e",
            numbers=f"{again} · {pairs:,} · {size.h:,} · {each}",
        )


def _passes(spec: RunSpec, rank: int) -> int:
    """Layers times micro-steps and microbatches."""
    held = stages(spec, spec.parallelism.place(rank)["pp"])
    return sum(stage.num_layers for stage in held) * spec.accumulation * spec.parallelism.num_microbatches
