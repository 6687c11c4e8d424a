"""The sizes that a rank's activations have, and the bytes of their elements.

Symbols, as docs/memory.md uses them:

    b s n       sequences and tokens a sequence of one microbatch on this rank; n = b s
    h           width of the stream (d_model)
    q k f v     widths of all query heads, of all key heads, of the feed-forward and of the vocabulary on this rank
    V           width of the logits, the whole vocabulary: tp gathers them before the loss
    a           query heads on this rank
    m           n, or n / t with sequence parallelism: tokens outside the matrices that tp cuts
    e_s e_c e_a bytes of the stream, of the matrix products' tensors and of attention's
    e_w         bytes of what is computed in FP32 or wider
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.ledger.inventory import vocabulary
from harness.ledger.terms import BYTES
from harness.spec import RunSpec


@dataclass(frozen=True)
class Widths:
    b: int
    s: int
    h: int
    q: int
    k: int
    f: int
    v: int
    V: int
    a: int
    t: int
    m: int
    e_s: int
    e_c: int
    e_a: int
    e_w: int
    casts: bool
    """Autocast makes a copy of each weight in the products' dtype."""

    @property
    def n(self) -> int:
        return self.b * self.s


def widths(spec: RunSpec, vocab_size: int | None = None) -> Widths:
    """Of the largest rank; every data-parallel rank has as many sequences as any other (mesh_problems checks it)."""
    model, mesh, precision = spec.model, spec.parallelism, spec.precision
    pieces = mesh.data_shards * spec.accumulation * mesh.num_microbatches
    b, s = -(-spec.batch_size // pieces), -(-spec.seq_len // mesh.cp)
    compute, stored = BYTES[precision.compute], BYTES[precision.weights]
    # FSDP2's MixedPrecisionPolicy takes autocast's place where it has ranks to shard over and no recipe casts.
    sharded = mesh.zero >= 2 and mesh.dp * mesh.ep * mesh.cp > 1
    gathered_narrow = sharded and compute < stored and precision.recipe is None
    stream = compute if gathered_narrow else stored
    wide = max(4, stream)
    width, vocab = model.head_width, vocabulary(model, vocab_size)
    return Widths(
        b=b,
        s=s,
        h=model.d_model,
        q=model.num_heads * width // mesh.tp,
        k=model.num_kv_heads * width // mesh.tp,
        f=-(-model.d_ffn // mesh.tp),
        v=-(-vocab // mesh.tp),
        V=vocab,
        a=model.num_heads // mesh.tp,
        t=mesh.tp,
        m=b * -(-s // mesh.tp) if mesh.sequence_parallel else b * s,
        e_s=stream,
        e_c=compute,
        e_a=max(4, compute) if spec.device == "cpu" else compute,
        e_w=wide,
        casts=compute != stored and not gathered_narrow,
    )
