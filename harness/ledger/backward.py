"""What comes and goes while the head's and one layer's backward pass run, operator by operator.

Follows harness.models.functions and PyTorch's autograd: a product's backward makes both gradients before it lets its
operands go; under autocast a weight's gradient is made in the compute dtype and then cast; RMSNorm's and the loss's
are in FP32 or wider. Symbols as in harness.ledger.widths.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.ledger.activations import head_copies, head_terms, layer_copies, layer_terms
from harness.ledger.mixture import mixture_backward
from harness.ledger.step import Category
from harness.ledger.tape import GRADIENT, Played, Tape
from harness.ledger.terms import Term
from harness.ledger.widths import Widths
from harness.spec import RunSpec


@dataclass(frozen=True)
class Made:
    """How a parameter's gradient comes about and where it stays."""

    made_e: int
    """Bytes an element of what the matrix product gives."""
    e: int
    """Bytes an element of the gradient itself; a cast stands between the two where they differ."""
    stays: Category | None
    """What it counts as until the piece is over; None: its place was there before (a bucket of DDP, the gradient that
    an earlier micro-step left), and the new one is gone as soon as it is added."""
    moves: bool = False
    """Whether the sum of the micro-steps before goes as well, into a bucket that was there all the time: DDP's last
    micro-step."""

    def finish(self, tape: Tape, name: str, numel: int) -> None:
        """What becomes of the gradient `name`, once it is there."""
        if self.stays is None:
            tape.drop(f"{GRADIENT}{name}")
        if self.moves:
            tape.gone(numel * self.e, "gradients")


def head_backward(spec: RunSpec, w: Widths, made: Made) -> Played:
    """The loss, the head and the last norm, from the end of the forward pass."""
    tape = Tape()
    wide = max(4, w.e_c)
    kept = {term.name: term for term in (*head_terms(spec, w), *head_copies(spec, w))}
    for term in kept.values():
        tape.there(term.name, term.num_bytes)
    tape.doing("loss")
    tape.hold("gradient of log-probabilities", w.n * w.V * wide)
    tape.hold("gradient of wide logits", w.n * w.V * wide)
    tape.drop("log-probabilities", "number of targets", "gradient of log-probabilities")
    name = "gradient of wide logits"
    if wide != w.e_c:
        tape.hold("gradient of logits", w.n * w.V * w.e_c)
        tape.drop(name)
        name = "gradient of logits"
    _linear(tape, w, "head", name, w.h, w.v, w.h, made, kept)
    _norm(tape, spec, w, "last norm", "head", made)
    return tape.played()


def layer_backward(spec: RunSpec, w: Widths, layer: int, made: Made) -> Played:
    """One layer's backward pass, recomputation included, from the gradient of its output to that of its input."""
    tape = Tape()
    kept = _kept(tape, spec, w, layer)
    tape.there("stream", w.m * w.h * w.e_s, "temporary")
    _ffn(tape, spec, w, made, kept)
    _attention(tape, spec, w, made, kept)
    if spec.recompute == "full":
        tape.drop("layer input")
    return tape.played()


def _kept(tape: Tape, spec: RunSpec, w: Widths, layer: int) -> dict[str, Term]:
    """Put what the layer kept, or computes anew, on the tape."""
    kept = {term.name: term for term in (*layer_terms(spec, w, layer), *layer_copies(spec, w, layer))}
    if spec.recompute == "full":
        tape.doing("recomputation")
        tape.there("layer input", w.m * w.h * w.e_s)
        for term in kept.values():
            tape.hold(term.name, term.num_bytes)
    else:
        for term in kept.values():
            tape.there(term.name, term.num_bytes)
    return kept


def _ffn(tape: Tape, spec: RunSpec, w: Widths, made: Made, kept: dict[str, Term]) -> None:
    tape.doing("feed-forward")
    out = _narrow(tape, w, "ffn")
    if spec.model.moe is not None:
        mixture_backward(tape, spec, w, made, out)
        _norm(tape, spec, w, "ffn norm", "ffn.experts", made)
        return
    _linear(tape, w, "ffn.down", out, w.f, w.h, w.f, made, kept)
    tape.doing("activation function")
    if spec.model.ffn == "gelu":
        tape.hold("gradient of ffn.up", w.n * w.f * w.e_c)
        tape.drop("ffn.up output", "gradient of ffn.down input")
        _linear(tape, w, "ffn.up", "gradient of ffn.up", w.h, w.f, w.h, made, kept)
        _norm(tape, spec, w, "ffn norm", "ffn.up", made)
        return
    tape.hold("gradient of gate and up", 2 * w.n * w.f * w.e_c)
    tape.hold("gradient times up", w.n * w.f * w.e_c)
    tape.drop("gradient times up", "gradient of ffn.down input", "gate and up", "silu(gate)")
    tape.doing("feed-forward")
    _linear(tape, w, "ffn.gate_up", "gradient of gate and up", w.h, 2 * w.f, w.h, made, kept)
    _norm(tape, spec, w, "ffn norm", "ffn.gate_up", made)


def _attention(tape: Tape, spec: RunSpec, w: Widths, made: Made, kept: dict[str, Term]) -> None:
    tape.doing("attention output")
    out = _narrow(tape, w, "attention")
    _linear(tape, w, "attention.output", out, w.q, w.h, w.q, made, kept)
    tape.doing("attention")
    gradient = "gradient of attention.output input"
    if w.e_a != w.e_c:
        tape.hold("gradient of attention product", w.n * w.q * w.e_a)
        tape.drop(gradient)
        gradient = "gradient of attention product"
    if spec.recompute == "selective":
        tape.hold("log-sum-exp", w.n * w.a * max(4, w.e_a))
        tape.hold("attention product", w.n * w.q * w.e_a)
    if spec.parallelism.cp > 1:
        tape.hold("pieces of context parallelism", _pieces(spec, w))
        tape.drop("pieces of context parallelism")
    tape.hold("gradients of q, k and v", w.n * (w.q + 2 * w.k) * w.e_a)
    tape.drop(
        "rotated q and k",
        "v",
        "q, k and v",
        "log-sum-exp",
        "attention product",
        "softmax of the scores",
        "mask",
        gradient,
    )
    tape.doing("rotation")
    if spec.model.positions == "rope" or spec.model.qk_norm:
        tape.hold("gradient of qkv, wide", w.n * (w.q + 2 * w.k) * w.e_a)
        if w.e_a != w.e_c:
            tape.hold("gradient of qkv", w.n * (w.q + 2 * w.k) * w.e_c)
            tape.drop("gradient of qkv, wide")
    else:
        tape.hold("gradient of qkv", w.n * (w.q + 2 * w.k) * w.e_c)
    tape.drop("gradients of q, k and v", "qkv, of which v is a view")
    name = "gradient of qkv"
    if w.e_a == w.e_c and spec.model.positions == "rope":
        name = "gradient of qkv, wide"
    tape.doing("qkv")
    tape.drop("normalised q and k", "q and k: 1 / rms")
    _linear(tape, w, "attention.qkv", name, w.h, w.q + 2 * w.k, w.h, made, kept)
    _norm(tape, spec, w, "attention norm", "attention.qkv", made)


def _pieces(spec: RunSpec, w: Widths) -> int:
    """The most that attention over several ranks' tokens holds in its backward pass (harness.parallel.context), the
    gradients that it returns among it: those of queries, those of one rectangle of queries and keys, and buffers of
    keys and values.

    On the ring these are at each hop: keys and values here, those that come, gradients of the rank's own, those of the
    others', and from the third hop on those that go home and those that come from there.
    """
    cp, wide = spec.parallelism.cp, max(4, w.e_a)
    queries, pair = w.n * w.q, 2 * w.n * w.k
    beside = queries * (w.e_a + wide)  # gradients of the product and of the queries
    if spec.parallelism.context == "all-gather":
        return beside + (queries + pair) * w.e_a + cp * pair * (w.e_a + wide)
    hops = []
    for hop in range(cp):
        here = 1 + (hop < cp - 1)
        gradients = 1 + (hop > 0) + 2 * (hop > 1)
        rectangle = queries if hop == 0 else queries // 2
        hops.append(pair * (here * w.e_a + gradients * wide) + (rectangle + pair) * w.e_a)
    return beside + max(hops)


def _narrow(tape: Tape, w: Widths, name: str) -> str:
    """The gradient of what is added to the stream, in the products' dtype."""
    if w.e_s == w.e_c:
        return "stream"
    tape.hold(f"gradient of {name}", w.n * w.h * w.e_c)
    return f"gradient of {name}"


def _linear(
    tape: Tape,
    w: Widths,
    name: str,
    gradient: str,
    into: int,
    out: int,
    width: int,
    made: Made,
    kept: dict[str, Term],
) -> None:
    """A linear [out, into]: the gradients of input [n, width] and weight, then the latter's cast."""
    tape.hold(f"gradient of {name} input", w.n * width * w.e_c)
    numel = into * out
    category = made.stays or "temporary"
    cast = made.made_e != made.e
    if cast:
        tape.hold("gradient of weight", numel * made.made_e)
    else:
        tape.hold(f"{GRADIENT}{name}.weight", numel * made.e, category)
    if gradient != "stream":
        tape.drop(gradient)
    tape.drop(*(term for term in kept if term.startswith((f"{name} input", f"{name} weight"))))
    if cast:
        tape.hold(f"{GRADIENT}{name}.weight", numel * made.e, category)
        tape.drop("gradient of weight")
    made.finish(tape, f"{name}.weight", numel)


def _norm(tape: Tape, spec: RunSpec, w: Widths, name: str, linear: str, made: Made) -> None:
    """RMSNorm's hand-written backward: g and the product in FP32, dx, and its sum with the stream's gradient."""
    tape.doing(name)
    each = w.m * w.h
    tape.hold("g, wide", each * w.e_w if w.e_c != w.e_w else 0)
    tape.hold("normalised, wide", each * w.e_w if w.e_s != w.e_w else 0)
    tape.hold("g normalised", each * w.e_w)
    tape.hold("dx, wide", each * w.e_w)
    if w.e_s != w.e_w:
        tape.hold("dx", each * w.e_s)
        tape.drop("dx, wide")
    tape.drop("g, wide", "normalised, wide", "g normalised", f"gradient of {linear} input")
    tape.drop(
        f"{name}: normalised input", f"{name}: 1 / rms", f"{name}: input", f"{name}: mean, 1 / deviation"
    )
    tape.hold(f"{GRADIENT}{name}", w.h * made.e, made.stays or "temporary")
    made.finish(tape, name, w.h)
    if name == "last norm":
        tape.hold("stream", each * w.e_s)
    tape.drop("dx", "dx, wide")
