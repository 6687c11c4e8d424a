"""What the ranks of tp exchange around the matrices that they hold in parts: harness.parallel.tensor, to the byte.

    n = b s tokens of a microbatch, whole; h the stream's width, v the vocabulary; e_c, e_s as in harness.ledger.widths

    tp                                     forward                        backward
      attention, feed-forward, each        all_reduce n h e_c             all_reduce n h e_c
      embedding                            all_reduce n h e_s             none
      head                                 all_gather n v e_c             all_reduce n h e_c
    tp with sequence_parallel
      attention, feed-forward, each        all_gather, reduce_scatter     the same, each n h e_c
      embedding                            reduce_scatter n h e_s         all_gather n h e_s
      head                                 all_gather n h e_c, n v e_c    reduce_scatter n h e_c

Together 8 n h e (t - 1) / t bytes sent a layer, with or without sequence parallelism (Narayanan et al. 2021;
Korthikanti et al. 2022). PyTorch keeps the gathered input of a matrix, so nothing is gathered again in the backward
pass. Recomputing a whole layer runs its forward collectives again but for the last, whose result nothing needs. Once
a step, all_reduce of the gradients that every rank saw a part of.
"""

from __future__ import annotations

from collections.abc import Iterator

from harness.ledger.placement import local_parameters, stages
from harness.ledger.states import shard_numel, shards
from harness.ledger.traffic.base import Traffic, calls
from harness.ledger.traffic.data import gradient_bytes
from harness.ledger.widths import Widths, widths
from harness.spec import RunSpec

ALWAYS_PARTIAL = ("query_norm.weight", "key_norm.weight", "query_norm.bias", "key_norm.bias")
PARTIAL_ALONG_SEQUENCE = (
    "norm.weight",
    "norm.bias",
    "attention.output.bias",
    "ffn.down.bias",
    "positions.weight",
)


def tensor(spec: RunSpec, vocab_size: int | None, rank: int) -> Iterator[Traffic]:
    """Activations and their gradients in one rank's step."""
    mesh = spec.parallelism
    if mesh.tp == 1:
        return
    held = stages(spec, mesh.place(rank)["pp"])
    passes = spec.accumulation * mesh.num_microbatches
    layers = passes * sum(stage.num_layers for stage in held)
    embeddings = passes * sum(stage.has_embedding for stage in held)
    heads = passes * sum(stage.has_head for stage in held)
    yield from (_sequence if mesh.sequence_parallel else _plain)(spec, vocab_size, layers, embeddings, heads)
    cut = shards(spec, rank)
    partial = sum(
        shard_numel(each, *cut.of(each))[1]
        for each in local_parameters(spec, vocab_size, rank)
        if is_partial(each.name, mesh.sequence_parallel)
    )
    if partial:
        e_g = gradient_bytes(spec)
        yield calls(
            "gradients seen in parts", "tp", "all_reduce", mesh.tp, calls=1, P_partial=partial, e_g=e_g
        )


def is_partial(name: str, sequence_parallel: bool) -> bool:
    """Whether each rank of tp sees only a part of the gradient of a parameter that it holds whole."""
    return name.endswith(ALWAYS_PARTIAL) or (sequence_parallel and name.endswith(PARTIAL_ALONG_SEQUENCE))


def read_bytes(spec: RunSpec, w: Widths) -> int:
    """Bytes an element of what a norm hands to a matrix: autocast runs LayerNorm in FP32."""
    return max(4, w.e_c) if w.casts and spec.model.norm == "layernorm" else w.e_c


def _sizes(
    spec: RunSpec, vocab_size: int | None
) -> tuple[dict[str, int], dict[str, int], dict[str, int], dict[str, int]]:
    """Payloads: the stream as a matrix reads it, as a matrix leaves it, as the embedding gives it, and the logits."""
    w = widths(spec, vocab_size)
    read = read_bytes(spec, w)
    stream = {"b": w.b, "s": w.s, "h": w.h}
    whole = w.v * spec.parallelism.tp
    return (
        {**stream, "e_c": read},
        {**stream, "e_c": w.e_c},
        {**stream, "e_s": w.e_s},
        {"b": w.b, "s": w.s, "v": whole, "e_c": w.e_c},
    )


def _plain(
    spec: RunSpec, vocab_size: int | None, layers: int, embeddings: int, heads: int
) -> Iterator[Traffic]:
    t, full = spec.parallelism.tp, spec.recompute == "full"
    read, left, embedded, logits = _sizes(spec, vocab_size)
    forward = 3 if full else 2
    again = ", one computed twice" if full else ""
    yield calls(
        f"sums of attention and feed-forward{again}", "tp", "all_reduce", t, calls=forward * layers, **left
    )
    yield calls("gradients of what they read", "tp", "all_reduce", t, calls=2 * layers, **read)
    yield calls("embedded tokens", "tp", "all_reduce", t, calls=embeddings, **embedded)
    yield calls("logits", "tp", "all_gather", t, calls=heads, **logits)
    yield calls("gradient of what the head reads", "tp", "all_reduce", t, calls=heads, **read)


def _sequence(
    spec: RunSpec, vocab_size: int | None, layers: int, embeddings: int, heads: int
) -> Iterator[Traffic]:
    t, full = spec.parallelism.tp, spec.recompute == "full"
    read, left, embedded, logits = _sizes(spec, vocab_size)
    again = ", computed twice" if full else ""
    gathers, sums = (4, 3) if full else (2, 2)
    yield calls(f"stream that matrices read{again}", "tp", "all_gather", t, calls=gathers * layers, **read)
    yield calls(
        f"sums of attention and feed-forward{again}", "tp", "reduce_scatter", t, calls=sums * layers, **left
    )
    yield calls("gradients of sums", "tp", "all_gather", t, calls=2 * layers, **left)
    yield calls("gradients of what matrices read", "tp", "reduce_scatter", t, calls=2 * layers, **read)
    yield calls("embedded tokens", "tp", "reduce_scatter", t, calls=embeddings, **embedded)
    yield calls("gradient of embedded tokens", "tp", "all_gather", t, calls=embeddings, **embedded)
    yield calls("stream that the head reads", "tp", "all_gather", t, calls=heads, **read)
    yield calls("logits", "tp", "all_gather", t, calls=heads, **logits)
    yield calls("gradient of what the head reads", "tp", "reduce_scatter", t, calls=heads, **read)
