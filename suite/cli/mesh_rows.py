"""Rows of `suite list parallelisms`: ranks, what is cut, and what is exchanged, in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness.spec import ParallelismSpec

ZERO = {0: "DDP", 1: "ZeRO-1", 2: "ZeRO-2 (FSDP2)", 3: "ZeRO-3 (FSDP2)"}
GRADIENTS = {
    0: "gradients once a step",
    1: "gradients once a step, updated weights",
    2: "weights once and gradients once a micro-step",
    3: "weights twice and gradients once a micro-step",
}
"""ZeRO stage -> what data-parallel ranks exchange."""


def mesh_rows() -> Sequence[dict[str, Any]]:
    """The presets, each with its ranks, its scheme and its communication."""
    from suite.declare import preset_texts, presets

    specs = presets("parallelisms")
    return [
        {
            "name": name,
            "ranks": specs[name].num_ranks,
            "scheme": scheme(specs[name]),
            "exchanged": exchanged(specs[name]),
            "about": text.about.get("about", ""),
            "paper": text.about.get("source"),
        }
        for name, text in preset_texts("parallelisms").items()
    ]


def scheme(mesh: ParallelismSpec) -> str:
    """`ZeRO-3 (FSDP2) over 2, TP 2`."""
    return ", ".join(_scheme(mesh)) or "one process"


def _scheme(mesh: ParallelismSpec) -> Iterator[str]:
    if mesh.replicas > 1:
        yield f"HSDP, {mesh.replicas} replicas of {mesh.dp // mesh.replicas} shards"
    elif mesh.dp > 1:
        yield f"{ZERO[mesh.zero]} over {mesh.dp}"
    if mesh.pp > 1:
        stages = f", {mesh.local_stages} stages a rank" if mesh.local_stages > 1 else ""
        yield f"PP {mesh.pp} ({mesh.schedule}{stages})"
    if mesh.ep > 1:
        yield f"EP {mesh.ep}"
    if mesh.cp > 1:
        yield f"CP {mesh.cp} ({mesh.context})"
    if mesh.tp > 1:
        yield f"TP {mesh.tp}" + (" with sequence parallelism" if mesh.sequence_parallel else "")


def exchanged(mesh: ParallelismSpec) -> str:
    """What ranks send each other, by axis."""
    return "; ".join(_exchanged(mesh)) or "nothing"


def _exchanged(mesh: ParallelismSpec) -> Iterator[str]:
    if mesh.dp * mesh.ep * mesh.cp > 1:
        over = "+".join(axis for axis in ("dp", "ep", "cp") if getattr(mesh, axis) > 1)
        yield f"{over}: {GRADIENTS[mesh.zero]}" + (", shards over replicas" if mesh.replicas > 1 else "")
    if mesh.pp > 1:
        yield "pp: the stream and its gradient, each microbatch and boundary"
    if mesh.ep > 1:
        yield "ep: tokens to experts and back, forward and backward"
    if mesh.cp > 1:
        how = "passed round" if mesh.context == "ring" else "gathered"
        yield f"cp: keys and values {how} twice, their gradients once"
    if mesh.tp > 1:
        kinds = "4 all-gathers, 4 reduce-scatters" if mesh.sequence_parallel else "4 all-reduces"
        yield f"tp: {kinds} a layer, the logits"
