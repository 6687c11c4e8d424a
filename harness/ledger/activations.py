"""What autograd keeps for the backward pass: bytes of each layer, of the head, of copies of weights.

Counted as `saved_tensors_hooks` sees it, in unique storages, parameters and the batch apart; exact for the modules of
harness.models (tests/harness/ledger/test_activations.py measures each precision, recomputation and feed-forward). For
one microbatch of a layer without recomputation, in the symbols of harness.ledger.widths:

    norms        2 (m h e_s + m e_w)         the normalised input and 1 / rms
    qkv          n h e_c                     its input
    rotary       n (q + k) e_a               q and k after rotation
    values       n k e_a                     a copy where attention runs in another dtype than the projection; else
                                             v is a view that keeps the whole projection alive: n (q + 2 k) e_c
    attention    n q e_a + n a e_w           the product and its log-sum-exp
    output       n q e_c                     its input, where that is not the product itself
    ffn          n h e_c + n 4 f e_c         input; gate and up, silu(gate), and their product
                 n h e_c + n 2 f e_c         with GELU: input; what it is applied to, and what it gives

With stored scores (kernel `eager`) attention keeps 3 n q e_a (operands of its two products), b a s^2 e_a (softmax)
and s^2 (mask) in place of rotary, values and product. `selective` drops the log-sum-exp, and the product where
another copy of it is kept; `full` keeps m h e_s, the layer's input. The head keeps norm, input and the
log-probabilities n V e_w.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from harness.ledger.mixture import mixture_copies, mixture_terms
from harness.ledger.placement import Stage, stages
from harness.ledger.recipes import is_quantized, kept_operand
from harness.ledger.terms import BYTES, Term, product, total
from harness.ledger.widths import Widths, widths
from harness.spec import RunSpec


@dataclass(frozen=True)
class Activations:
    """Bytes kept for the backward pass by a rank's stages."""

    layers: tuple[Term, ...]
    """All its layers, for one microbatch."""
    head: tuple[Term, ...]
    """Head and embedding, for one microbatch; none on a stage without them."""
    copies: tuple[Term, ...]
    """Weights in another dtype, once however many microbatches are in flight."""

    @property
    def one_microbatch(self) -> int:
        return total(self.layers) + total(self.head)

    @property
    def saved(self) -> int:
        """All of it with one microbatch in flight."""
        return self.one_microbatch + total(self.copies)

    @property
    def terms(self) -> tuple[Term, ...]:
        return (*self.layers, *self.head, *self.copies)


def activations(spec: RunSpec, vocab_size: int | None = None, rank: int = 0) -> Activations:
    """What one microbatch leaves on a rank at the end of its forward pass, over all its stages."""
    w = widths(spec, vocab_size)
    parts = [stage_activations(spec, w, stage) for stage in stages(spec, spec.parallelism.place(rank)["pp"])]
    return Activations(
        layers=tuple(term for part in parts for term in part.layers),
        head=tuple(term for part in parts for term in part.head),
        copies=tuple(term for part in parts for term in part.copies),
    )


def stage_activations(spec: RunSpec, w: Widths, stage: Stage) -> Activations:
    """What one microbatch leaves on one stage."""
    layers: list[Term] = []
    copies: list[Term] = []
    for (kept, copied), count in _alike(spec, w, stage).items():
        symbol = "L" if count == stage.num_layers else "L_i"
        layers += [term.times(count, symbol) for term in kept]
        copies += [term.times(count, symbol) for term in copied]
    ends = (*position_terms(spec, w), *(embedding_terms(w) if stage.has_embedding else ()))
    if stage.has_head:
        ends += head_terms(spec, w)
        copies += head_copies(spec, w)
    return Activations(tuple(layers), ends, tuple(copies))


def stored_by_layer(spec: RunSpec, w: Widths, layer: int) -> list[Term]:
    """What a layer keeps of one microbatch, with the run's recomputation."""
    if spec.recompute == "full":
        return [product("activations", "layer input", m=w.m, h=w.h, e_s=w.e_s)]
    return list(layer_terms(spec, w, layer))


def layer_terms(spec: RunSpec, w: Widths, layer: int) -> Iterator[Term]:
    """What a layer keeps of one microbatch without full recomputation, weights' copies apart."""
    if spec.reference != "none":
        yield from reference_terms(spec, w)
        return
    yield from _norm_terms(spec, w, "attention norm")
    e_n = w.e_c if spec.model.norm == "rmsnorm" or not is_quantized(spec, layer, "attention.qkv") else w.e_s
    yield from _linear_input(spec, layer, "attention.qkv", n=w.n, h=w.h, e_c=e_n)
    yield from _attention_terms(spec, w, layer)
    yield from _norm_terms(spec, w, "ffn norm")
    if spec.model.moe is not None:
        yield from mixture_terms(spec, w)
        return
    if spec.model.ffn == "gelu":
        e_n = w.e_c if spec.model.norm == "rmsnorm" or not is_quantized(spec, layer, "ffn.up") else w.e_s
        yield from _linear_input(spec, layer, "ffn.up", n=w.n, h=w.h, e_c=e_n)
        yield product("activations", "ffn.up output", n=w.n, f=w.f, e_c=w.e_c)
    else:
        yield from _linear_input(spec, layer, "ffn.gate_up", n=w.n, h=w.h, e_c=w.e_c)
        yield product("activations", "gate and up", n=w.n, two=2, f=w.f, e_c=w.e_c)
        yield product("activations", "silu(gate)", n=w.n, f=w.f, e_c=w.e_c)
    yield from _linear_input(spec, layer, "ffn.down", n=w.n, f=w.f, e_c=w.e_c)


def reference_terms(spec: RunSpec, w: Widths) -> Iterator[Term]:
    """harness.models.reference's layer: 34 sbh + 5 as²b (Korthikanti et al. 2022), and the norms' statistics."""
    yield from _norm_terms(spec, w, "attention norm")
    yield product("activations", "attention.qkv input", n=w.n, h=w.h, e_c=w.e_c)
    yield product("activations", "q, k and v", n=w.n, q_plus_2k=w.q + 2 * w.k, e_c=w.e_c)
    if spec.recompute != "selective":
        for name, each in (("softmax", w.e_c), ("mask of its dropout", 1), ("output of its dropout", w.e_c)):
            yield product("activations", name, b=w.b, a=w.a, s=w.s, s_=w.s, e=each)
    yield product("activations", "attention.output input", n=w.n, q=w.q, e_c=w.e_c)
    yield product("activations", "attention: mask of dropout", n=w.n, h=w.h, e=1)
    yield from _norm_terms(spec, w, "ffn norm")
    yield product("activations", "ffn.up input", n=w.n, h=w.h, e_c=w.e_c)
    yield product("activations", "ffn.up output", n=w.n, f=w.f, e_c=w.e_c)
    yield product("activations", "ffn.down input", n=w.n, f=w.f, e_c=w.e_c)
    yield product("activations", "ffn: mask of dropout", n=w.n, h=w.h, e=1)


def head_terms(spec: RunSpec, w: Widths) -> tuple[Term, ...]:
    """What the last norm, the head and the loss keep of one microbatch."""
    return (
        *_norm_terms(spec, w, "last norm"),
        *_linear_input(spec, None, "head", n=w.n, h=w.h, e_c=w.e_c),
        product("activations", "log-probabilities", n=w.n, V=w.V, e_w=max(4, w.e_c)),
        Term("activations", "number of targets", "e_w", str(max(4, w.e_c)), max(4, w.e_c)),
    )


def embedding_terms(w: Widths) -> tuple[Term, ...]:
    """What the embedding keeps beside the batch: tp's places in its part of the vocabulary, and which tokens lie
    elsewhere."""
    if w.t == 1:
        return ()
    return (product("activations", "embedding: place, elsewhere", n=w.n, bytes=8 + 1),)


def position_terms(spec: RunSpec, w: Widths) -> tuple[Term, ...]:
    """What cp takes out of the batch and the table of rotations for the positions of this rank."""
    if spec.parallelism.cp == 1:
        return ()
    terms = (product("activations", "tokens and targets", n=w.n, two=2, bytes=8),)
    if spec.model.positions != "rope":
        return terms
    pair = 2 * max(4, BYTES[spec.precision.weights])
    width = spec.model.head_width // 2
    return (*terms, product("activations", "rotations", s=w.s, half_width=width, pair=pair))


def layer_copies(spec: RunSpec, w: Widths, layer: int) -> list[Term]:
    """Copies of a layer's weights kept for the backward pass: autocast's, or a recipe's quantised ones."""
    shapes = {"attention.qkv": (w.h, w.q + 2 * w.k), "attention.output": (w.q, w.h)}
    if spec.model.moe is None:
        up = ("ffn.up", w.f) if spec.model.ffn == "gelu" else ("ffn.gate_up", 2 * w.f)
        shapes |= {up[0]: (w.h, up[1]), "ffn.down": (w.f, w.h)}
    found: list[Term] = []
    for name, (into, out) in shapes.items():
        found += _copy(spec, w, layer, name, into, out)
    return found if spec.model.moe is None else [*found, *mixture_copies(spec, w)]


def head_copies(spec: RunSpec, w: Widths) -> list[Term]:
    """The head's copy."""
    return _copy(spec, w, None, "head", w.h, w.v)


def _alike(spec: RunSpec, w: Widths, stage: Stage) -> dict[tuple[tuple[Term, ...], tuple[Term, ...]], int]:
    """(what a layer keeps, its weights' copies) -> how many layers of a stage are so: all, unless a recipe leaves some
    out."""

    def kept(layer: int) -> tuple[tuple[Term, ...], tuple[Term, ...]]:
        copies = () if spec.recompute == "full" else tuple(layer_copies(spec, w, layer))
        return tuple(stored_by_layer(spec, w, layer)), copies

    if spec.precision.recipe is None:
        return {kept(stage.first): stage.num_layers} if stage.num_layers else {}
    return dict(Counter(map(kept, range(stage.first, stage.last))))


def _norm_terms(spec: RunSpec, w: Widths, name: str) -> Iterator[Term]:
    if spec.model.norm == "rmsnorm":
        yield product("activations", f"{name}: normalised input", m=w.m, h=w.h, e_s=w.e_s)
        yield product("activations", f"{name}: 1 / rms", m=w.m, e_w=w.e_w)
    else:
        yield product("activations", f"{name}: input", m=w.m, h=w.h, e_s=w.e_s)
        yield product("activations", f"{name}: mean, 1 / deviation", m=w.m, two=2, e_s=w.e_s)


def _attention_terms(spec: RunSpec, w: Widths, layer: int) -> Iterator[Term]:
    """From the fused projection to the output linear's input."""
    model = spec.model
    if model.qk_norm:
        yield product("activations", "normalised q and k", n=w.n, q_plus_k=w.q + w.k, e_c=w.e_c)
        heads = (w.q + w.k) // model.head_width
        yield product("activations", "q and k: 1 / rms", n=w.n, heads=heads, e_w=max(4, w.e_c))
    stored = spec.attention.kernel == "eager" and spec.recompute != "selective"
    if stored:  # batched products copy their operands, keys and values once for each query head
        yield product("activations", "q, k and v", n=w.n, three=3, q=w.q, e_a=w.e_a)
        yield product("activations", "softmax of the scores", b=w.b, a=w.a, s=w.s, s_=w.s, e_a=w.e_a)
        yield product("activations", "mask", s=w.s, s_=w.s)
    else:
        yield from _core_terms(spec, w, layer)
    yield from _linear_input(spec, layer, "attention.output", n=w.n, q=w.q, e_c=w.e_c)


def _core_terms(spec: RunSpec, w: Widths, layer: int) -> Iterator[Term]:
    """What a flash kernel keeps, or its recomputation."""
    rope, same = spec.model.positions == "rope", w.e_a == w.e_c
    if rope:
        yield product("activations", "rotated q and k", n=w.n, q_plus_k=w.q + w.k, e_a=w.e_a)
    if same:  # v is a view: the whole projection stays alive
        yield product("activations", "qkv, of which v is a view", n=w.n, q_plus_2k=w.q + 2 * w.k, e_c=w.e_c)
    elif rope:
        yield product("activations", "v", n=w.n, k=w.k, e_a=w.e_a)
    else:
        yield product("activations", "q, k and v", n=w.n, q_plus_2k=w.q + 2 * w.k, e_a=w.e_a)
    if spec.recompute != "selective":
        yield product("activations", "log-sum-exp", n=w.n, a=w.a, e_w=max(4, w.e_a))
        if not same or is_quantized(spec, layer, "attention.output"):
            yield product("activations", "attention product", n=w.n, q=w.q, e_a=w.e_a)


def _linear_input(spec: RunSpec, layer: int | None, name: str, **factors: int) -> Iterator[Term]:
    """The input that a linear keeps for its weights' gradient: as it is, or the recipe's cast of it."""
    if not is_quantized(spec, layer, name):
        yield product("activations", f"{name} input", **factors)
        return
    kept = kept_operand(spec, "activations")
    if not kept.shared:
        yield product("activations", f"{name} input", **factors)
        return
    rows = factors["n"]
    yield product("activations", f"{name} input, cast", **{**factors, "e_c": kept.e})
    if kept.scale == "tensor":
        yield Term("activations", f"{name} input, scale", "4", "4", 4)
    elif kept.scale == "row":
        yield product("activations", f"{name} input, scales", n=rows, e_w=4)


def _copy(spec: RunSpec, w: Widths, layer: int | None, name: str, into: int, out: int) -> list[Term]:
    if is_quantized(spec, layer, name):
        kept = kept_operand(spec, "weights")
        if not kept.shared:
            return []
        scale = {"none": 0, "tensor": 1, "row": out}[kept.scale]
        copy = product("activations", f"{name} weight, cast", into=into, out=out, e_c=kept.e)
        return [copy, product("activations", f"{name} weight, scales", count=scale, four=4)][
            : 1 + bool(scale)
        ]
    if w.casts:
        return [product("activations", f"{name} weight, copy", into=into, out=out, e_c=w.e_c)]
    return []
