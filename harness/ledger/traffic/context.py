"""Keys and values of a sequence that is cut over ranks: harness.parallel.context, to the byte.

    S = 2 b (s / cp) h_kv w e      a rank's keys and values of one layer, h_kv heads of width w
    S_g                            their gradients, in FP32 or wider

    ring         forward: cp - 1 sends of S          backward: cp - 1 of S, cp - 1 of S_g
    all-gather   forward: all-gather to cp S         backward: all-gather to cp S, reduce-scatter of cp S_g

PyTorch's own (native) is taken for an all-gather; it repeats grouped heads, and its bytes have not been measured.
Recomputing the softmax product runs the forward part again. Liu et al. 2023 (ring), Llama 3 (all-gather).
"""

from __future__ import annotations

from collections.abc import Iterator

from harness.ledger.placement import stages
from harness.ledger.traffic.base import Traffic, calls
from harness.ledger.widths import widths
from harness.spec import RunSpec


def context(spec: RunSpec, vocab_size: int | None, rank: int) -> Iterator[Traffic]:
    """Keys, values and their gradients in one rank's step."""
    mesh = spec.parallelism
    if mesh.cp == 1:
        return
    size = widths(spec, vocab_size)
    layers = sum(stage.num_layers for stage in stages(spec, mesh.place(rank)["pp"]))
    passes = layers * spec.accumulation * mesh.num_microbatches
    forwards = passes if spec.recompute == "none" else 2 * passes
    local = {"kv": 2, "b": size.b, "s": size.s, "k": size.k}
    kept, gradient = {**local, "e": size.e_a}, {**local, "e": max(4, size.e_a)}
    again = "" if spec.recompute == "none" else ", computed twice"
    if mesh.context == "ring":
        hops = mesh.cp - 1
        for op in ("send", "recv"):
            yield calls(f"keys and values, forward{again}", "cp", op, mesh.cp, calls=hops * forwards, **kept)
            yield calls("keys and values, backward", "cp", op, mesh.cp, calls=hops * passes, **kept)
            yield calls("gradients of keys and values", "cp", op, mesh.cp, calls=hops * passes, **gradient)
        return
    whole, whole_gradient = {"cp": mesh.cp, **kept}, {"cp": mesh.cp, **gradient}
    yield calls(f"keys and values, forward{again}", "cp", "all_gather", mesh.cp, calls=forwards, **whole)
    yield calls("keys and values, backward", "cp", "all_gather", mesh.cp, calls=passes, **whole)
    yield calls(
        "gradients of keys and values", "cp", "reduce_scatter", mesh.cp, calls=passes, **whole_gradient
    )
