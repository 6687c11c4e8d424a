"""What one training step costs a rank: the one shape that formula, trace and measurement all give.

Three tasks record it under the same metric names and scopes, so that a claim may set any two side by side: `ledger` by
formula (predicted), `trace` by the real model on tensors without data (simulated), `step` by a real step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

Category = Literal["weights", "gradients", "optimizer", "activations", "communication", "temporary"]
CATEGORIES: tuple[Category, ...] = (
    *("weights", "gradients", "optimizer"),
    *("activations", "communication", "temporary"),
)
"""The six terms of the peak. weights: parameters and buffers as they lie between steps; activations: what is kept for
the backward pass, copies of weights in the compute dtype included; communication: gathered parameters, buckets and
buffers of collectives; temporary: all else that is alive at the peak."""
STATES = ("weights", "gradients", "optimizer")

Op = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send", "recv"]
CONTROL = "control"
"""In place of a mesh axis: losses and norms that are reduced for the record, not by the scheme."""


@dataclass(frozen=True)
class Collective:
    """All calls of one kind in one step of one rank."""

    axis: str
    """Mesh axis; axes of one group are joined by +, as in dp+cp; CONTROL."""
    op: Op
    count: int
    num_bytes: int
    """Payload: the whole tensor for all_reduce, all_gather (its output), reduce_scatter (its input) and broadcast; this
    rank's input for all_to_all; what is sent or received point to point."""
    group_size: int

    @property
    def sent_bytes(self) -> float:
        """Bytes that this rank puts on the wire by ring algorithms: 2 S (n - 1) / n for an all-reduce, S (n - 1) / n
        for all-gather, reduce-scatter and all-to-all, S for a send (Thakur et al. 2005)."""
        ring = (self.group_size - 1) / self.group_size
        if self.op == "recv":
            return 0.0
        if self.op in ("send", "broadcast"):
            return float(self.num_bytes)
        return self.num_bytes * ring * (2 if self.op == "all_reduce" else 1)


@dataclass(frozen=True)
class RankStep:
    """One rank's step."""

    rank: int
    peak: Mapping[Category, int]
    """Bytes of each category at the moment when their sum is largest."""
    moment: str
    """When that is: forward, backward or update."""
    state: Mapping[str, int]
    """Bytes that lie between steps: weights, optimizer; gradients as they are before the update."""
    saved: int
    """Bytes that autograd keeps at the end of the forward pass, beside parameters and the batch."""
    collectives: tuple[Collective, ...] = ()
    flops: int | None = None
    """Floating-point operations of this rank, recomputation included; None where they were not counted."""
    layers: Mapping[str, int] = field(default_factory=dict)
    """Module -> bytes it keeps for the backward pass, where that was found out."""

    @property
    def total(self) -> int:
        return sum(self.peak.values())


class Recorder(Protocol):
    """The part of a journal that is written to."""

    def measure(self, step: int, values: Mapping[str, float | None], scope: str = "") -> None: ...


def record(journal: Recorder, ranks: Sequence[RankStep], step: int = 1) -> None:
    """Write the ranks' steps: each under rankN.SCOPE, and under SCOPE alone the rank with the largest peak (memory) or
    the largest value (state, collectives, FLOPs)."""
    worst = max(ranks, key=lambda each: each.total)
    for each in ranks:
        _record_peak(journal, each, f"rank{each.rank}.", step)
    _record_peak(journal, worst, "", step)
    _largest(journal, step, "state_bytes", ((each.rank, each.state.items()) for each in ranks))
    _largest(journal, step, "saved_bytes", ((each.rank, [("", each.saved)]) for each in ranks))
    _largest(journal, step, "saved_bytes", ((each.rank, each.layers.items()) for each in ranks))
    for metric, value in (
        ("comm_bytes", "num_bytes"),
        ("comm_count", "count"),
        ("comm_sent_bytes", "sent_bytes"),
    ):
        found = (
            (each.rank, [(f"{c.axis}.{c.op}", getattr(c, value)) for c in each.collectives]) for each in ranks
        )
        _largest(journal, step, metric, found)
    flops = [(each.rank, [("", each.flops)]) for each in ranks if each.flops is not None]
    _largest(journal, step, "step_flops", flops)


def _record_peak(journal: Recorder, one: RankStep, prefix: str, step: int) -> None:
    for category in CATEGORIES:
        journal.measure(step, {"peak_bytes": one.peak.get(category, 0)}, scope=prefix + category)
    journal.measure(step, {"peak_bytes": one.total}, scope=f"{prefix}total")


def _largest(
    journal: Recorder, step: int, metric: str, ranks: Iterable[tuple[int, Iterable[tuple[str, float]]]]
) -> None:
    largest: dict[str, float] = {}
    for rank, values in ranks:
        for scope, value in values:
            journal.measure(step, {metric: value}, scope=".".join(filter(None, (f"rank{rank}", scope))))
            largest[scope] = max(value, largest.get(scope, value))
    for scope, value in largest.items():
        journal.measure(step, {metric: value}, scope=scope)
