"""What a mixture of experts keeps for the backward pass, in place of a dense feed-forward's terms
(harness.models.moe).

Symbols as in harness.ledger.widths, and k experts a token, E experts, r pairs of token and expert that the experts on
the rank compute: n k on one rank, on several what the router sends them, for which n k stands here (uniform routing,
an assumption as in harness.ledger.traffic.experts). With a capacity, as many pairs as a balanced router would get
through.

    router     n h e_w                     its input, in FP32 or wider
               n E e_w + n k e_w           logits, and the weights of the chosen
               n E e_w + E e_w             probabilities and shares of the load, with the auxiliary loss
                                           (k = 1: probabilities in the logits' place; the weights once alone)
               2 n k 8                     which were chosen; which pair stands where
    experts    r h e_c                     their input
               r 4 f e_c                   gate and up, silu(gate), and their product
    combining  n k h e_c                   outputs in the tokens' order, which the weights multiply
               n k e_c                     the weights again, where the products' dtype is another
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from harness.ledger.placement import local_parameters
from harness.ledger.step import Category
from harness.ledger.tape import GRADIENT, Tape
from harness.ledger.terms import BYTES, Term, product
from harness.ledger.widths import Widths
from harness.spec import RunSpec

if TYPE_CHECKING:
    from harness.ledger.backward import Made

INT64 = 8


def pairs_computed(spec: RunSpec, w: Widths) -> int:
    """r: pairs of one microbatch that the rank's experts compute under uniform routing."""
    moe = spec.model.moe
    assert moe is not None
    pairs = w.n * moe.top_k
    if not moe.capacity_factor:
        return pairs
    each, more = divmod(pairs, moe.experts)
    most = w.b * math.ceil(moe.capacity_factor * spec.seq_len * moe.top_k / moe.experts)
    return sum(min(most, each + (expert < more)) for expert in range(moe.experts))


def experts_lie_whole(spec: RunSpec) -> bool:
    """Whether FSDP2 shards the rest and leaves the experts: ep alone has dealt them out, one rank each."""
    mesh = spec.parallelism
    return spec.model.moe is not None and mesh.zero >= 2 and mesh.ep > 1 and mesh.dp * mesh.cp == 1


def expert_gradients(spec: RunSpec, vocab_size: int | None, rank: int) -> int:
    """Bytes of the buffer that gradients of a rank's experts lie in where they lie whole."""
    experts = (each.numel for each in local_parameters(spec, vocab_size, rank) if each.kind == "expert")
    return sum(experts) * BYTES[spec.precision.weights]


def mixture_terms(spec: RunSpec, w: Widths) -> Iterator[Term]:
    """Of one microbatch of one layer, weights' copies apart."""
    moe = spec.model.moe
    assert moe is not None
    n, k, e_w, r = w.n, moe.top_k, max(4, w.e_c), pairs_computed(spec, w)
    kind: Category = "activations"
    yield product(kind, "router input", n=n, h=w.h, e_w=e_w)
    if k > 1:
        yield product(kind, "router logits", n=n, E=moe.experts, e_w=e_w)
    if k == 1 or moe.aux_loss:
        yield product(kind, "router probabilities", n=n, E=moe.experts, e_w=e_w)
    if k > 1 or e_w == w.e_c:
        yield product(kind, "weights of the chosen", n=n, k=k, e_w=e_w)
    yield product(kind, "the chosen, and their order", n=n, k=k, two=2, e_i=INT64)
    if moe.aux_loss:
        yield product(kind, "load shares", E=moe.experts, e_w=e_w)
    yield product(kind, "experts' input", r=r, h=w.h, e_c=w.e_c)
    yield product(kind, "gate and up", r=r, two=2, f=w.f, e_c=w.e_c)
    yield product(kind, "silu(gate)", r=r, f=w.f, e_c=w.e_c)
    yield product(kind, "experts' down input", r=r, f=w.f, e_c=w.e_c)
    yield product(kind, "experts' outputs", n=n, k=k, h=w.h, e_c=w.e_c)
    if e_w != w.e_c:
        yield product(kind, "weights of the chosen, narrow", n=n, k=k, e_c=w.e_c)


def mixture_copies(spec: RunSpec, w: Widths) -> list[Term]:
    """Copies of a layer's weights kept for the backward pass: autocast's of the experts here, and the router's where
    it is stored in fewer than 4 bytes."""
    moe = spec.model.moe
    assert moe is not None
    found = []
    if w.casts or (experts_lie_whole(spec) and w.e_c < BYTES[spec.precision.weights]):
        here = moe.experts // spec.parallelism.ep
        found.append(product("activations", "experts, copy", E=here, three=3, h=w.h, f=w.f, e_c=w.e_c))
    if w.e_s < 4:
        found.append(product("activations", "router, copy", E=moe.experts, h=w.h, e_w=4))
    return found


def mixture_backward(tape: Tape, spec: RunSpec, w: Widths, made: Made, out: str) -> None:
    """The backward pass from the gradient named `out` of what is added to the stream to that of the layer's input,
    `gradient of ffn.experts input`.

    Each expert's weights get their gradients one after the other; when all are there, they are copied into the fused
    weight's (once more as large), the down projections' first.
    """
    moe = spec.model.moe
    assert moe is not None
    pairs, r, e_w = w.n * moe.top_k, pairs_computed(spec, w), max(4, w.e_c)
    here = moe.experts // spec.parallelism.ep
    tape.doing("combining")
    tape.hold("gradient of outputs", pairs * w.h * w.e_c)
    tape.hold("outputs times gradient", pairs * w.h * w.e_c)
    tape.drop("outputs times gradient", "experts' outputs", "weights of the chosen, narrow")
    if out != "stream":
        tape.drop(out)
    tape.hold("gradient of experts", r * w.h * w.e_c)
    tape.drop("gradient of outputs")
    tape.doing("experts")
    tape.hold("gradients of the first expert", r // here * 3 * w.f * w.e_c + 3 * w.f * w.h * made.e)
    tape.drop("gradients of the first expert")
    # From the first to the last expert the sum is linear: what it kept goes, its weights' gradients come.
    tape.drop("gate and up", "silu(gate)", "experts' down input", "experts' input", "experts, copy")
    tape.hold("gradients of experts' input", r * w.h * w.e_c)
    tape.hold("gradients of all down", here * w.f * w.h * made.e)
    tape.hold("gradients of all gate and up", here * 2 * w.f * w.h * made.e)
    category = made.stays or "temporary"
    # Those that ep shares out, and FSDP2 does not shard, have a buffer of their own for their gradients.
    apart = spec.parallelism.ep > 1 and (spec.parallelism.zero < 2 or experts_lie_whole(spec))
    stays = made.stays is not None and not apart
    for name, numel in (("down", here * w.f * w.h), ("gate and up", here * 2 * w.f * w.h)):
        tape.hold(f"{GRADIENT}experts' {name}", numel * made.e, category)
        tape.drop(f"gradients of all {name}")
        if not stays:
            tape.drop(f"{GRADIENT}experts' {name}")
        if made.moves and spec.parallelism.ep == 1:  # those that ep shares out are no business of DDP's
            tape.gone(numel * made.e, "gradients")
    tape.drop("gradient of experts")
    tape.doing("router")
    tape.hold("gradient of pairs", pairs * w.h * w.e_c)
    tape.drop("gradients of experts' input")
    tape.hold("gradient of ffn.experts input", w.n * w.h * w.e_c)
    tape.drop("gradient of pairs")
    tape.hold("gradient of router input", w.n * w.h * e_w)
    tape.hold(f"{GRADIENT}router", moe.experts * w.h * made.e, category)
    tape.drop(
        "router input", "router logits", "router probabilities", "weights of the chosen", "router, copy"
    )
    tape.drop("the chosen, and their order", "load shares", "gradient of router input")
    made.finish(tape, "router", moe.experts * w.h)
