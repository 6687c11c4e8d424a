"""What a pipeline's stages pass on: the stream forward, its gradient back, one message a microbatch and boundary.

Counts follow the schedule (harness.ledger.transfers): b s h e each (Narayanan et al. 2021), with v stages a rank v
times as many; stages on one rank, a V's turning point, hand on without a message.
"""

from __future__ import annotations

from collections.abc import Iterator

from harness.ledger.schedules import Pipeline
from harness.ledger.traffic.base import Traffic, calls
from harness.ledger.transfers import transfers
from harness.ledger.widths import widths
from harness.spec import RunSpec


def pipeline(spec: RunSpec, vocab_size: int | None, rank: int) -> Iterator[Traffic]:
    """Sends and receives of one rank's step."""
    mesh = spec.parallelism
    if mesh.pp == 1:
        return
    size, found = widths(spec, vocab_size), transfers(Pipeline.of(mesh), mesh.place(rank)["pp"])
    each = {"b": size.b, "s": size.m // size.b, "h": size.h, "e_s": size.e_s}
    yield calls(
        "stream and its gradients", "pp", "send", mesh.pp, calls=spec.accumulation * found.sends, **each
    )
    yield calls(
        "stream and its gradients", "pp", "recv", mesh.pp, calls=spec.accumulation * found.receives, **each
    )
