"""The moments of a step that can be its peak.

A step's memory rises through the forward pass to what autograd keeps, rises once more for the loss, and falls or
rises through the backward pass as layers give up what they kept and leave their gradients. Each layer is played once
(harness.ledger.backward) and set upon what lies there when its turn comes.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace

from harness.ledger.activations import layer_copies, stage_activations
from harness.ledger.backward import Made, head_backward, layer_backward
from harness.ledger.gathered import Gathered, gathered
from harness.ledger.mixture import expert_gradients, experts_lie_whole
from harness.ledger.placement import Stage, stages
from harness.ledger.states import bucketed_gradients, states
from harness.ledger.tape import Bytes, Played, add
from harness.ledger.terms import BYTES, total
from harness.ledger.update import update_bytes
from harness.ledger.widths import Widths, widths
from harness.spec import RunSpec


@dataclass(frozen=True)
class Moment:
    """What a rank holds at one moment."""

    phase: str
    """forward, backward or update."""
    name: str
    held: Bytes

    @property
    def total(self) -> int:
        return sum(self.held.values())


def peak(spec: RunSpec, vocab_size: int | None = None, rank: int = 0) -> Moment:
    """The moment at which a rank holds most."""
    return max(moments(spec, vocab_size, rank), key=lambda moment: moment.total)


def moments(spec: RunSpec, vocab_size: int | None = None, rank: int = 0) -> Iterator[Moment]:
    """Every candidate, in the order of the step."""
    if spec.parallelism.pp > 1:
        from harness.ledger.in_flight import pipeline_moments

        yield from pipeline_moments(spec, vocab_size, rank)
    else:
        yield from _whole_model(spec, vocab_size, rank)
    update = update_bytes(spec, vocab_size, rank)
    held = add(states(spec, vocab_size, rank).as_dict(), {"temporary": update})  # type: ignore[arg-type]
    yield Moment("update", "optimizer", held)


def _whole_model(spec: RunSpec, vocab_size: int | None, rank: int) -> Iterator[Moment]:
    """Forward and backward pass of a model that lies on the rank from embedding to head."""
    w = widths(spec, vocab_size)
    (stage,) = stages(spec, 0)
    groups = gathered(spec, vocab_size, rank)
    lying = states(spec, vocab_size, rank)
    made = gradients_made(spec, w, groups)
    base: Bytes = add({"weights": lying.weights, "optimizer": lying.optimizer})
    if made.stays is None or (groups is not None and groups.added):
        base = add(base, {"gradients": lying.gradients})
    elif experts_lie_whole(spec):
        base = add(base, {"gradients": expert_gradients(spec, vocab_size, rank)})
    kept = stage_activations(spec, w, stage).saved
    start = add(base, {"activations": kept, "communication": groups.at_loss if groups else 0})
    for left, each in _micro_steps(spec, vocab_size, rank, made):
        before = add(start, left)
        for held in loss_forward(spec, w, stage):
            yield Moment("forward", "loss", add(before, held))
        yield from stage_backward(spec, w, stage, each, before, groups)


def _micro_steps(
    spec: RunSpec, vocab_size: int | None, rank: int, made: Made
) -> Iterator[tuple[Bytes, Made]]:
    """(what those before left beside the places of gradients, how its own come about) of the micro-steps of which one
    holds most.

    Without DDP that is any after the first. DDP's buckets take the gradients in the last micro-step alone: until then
    they are added up beside them, and the last one moves them in one by one. So one in the middle holds both whole;
    of two, the first comes to it and the second starts with it.
    """
    mesh = spec.parallelism
    buckets = mesh.zero < 2 and mesh.dp * mesh.ep * mesh.cp > 1 and not spec.precision.main_gradients
    if not buckets or spec.accumulation == 1:
        yield {}, made
        return
    beside: Bytes = {"gradients": bucketed_gradients(spec, vocab_size, rank)}
    if spec.accumulation > 2:
        yield beside, made
        return
    yield {}, replace(made, stays="gradients")
    yield beside, replace(made, moves=True)


def stage_backward(
    spec: RunSpec, w: Widths, stage: Stage, made: Made, now: Bytes, groups: Gathered | None = None
) -> Generator[Moment, None, Bytes]:
    """The backward pass of one microbatch through a stage, from what is held at its start; returns what is held
    after."""
    if stage.has_head:
        # Tied: the head's gradient waits for the embedding's, to be added to it.
        waits = replace(made, stays=made.stays or "temporary", moves=False)
        head = head_backward(spec, w, waits if spec.model.tie_embeddings else made)
        yield _at(now, head)
        now = add(now, head.end)
    layers = range(stage.first, stage.last)
    if spec.precision.recipe is None:  # all alike
        known = dict.fromkeys(layers, layer_backward(spec, w, stage.first, made))
    else:
        known = {layer: layer_backward(spec, w, layer, made) for layer in layers}
    if groups is None:
        for _, played in sorted(known.items(), reverse=True):
            yield _at(now, played)
            now = add(now, played.end)
    else:
        now = yield from _sharded_layers(known, now, groups)
    if stage.has_embedding:
        tables = 2 if spec.model.tie_embeddings else 1  # with the sum of both
        embedding: Bytes = {made.stays or "temporary": made.e * w.v * w.h * tables}
        yield Moment("backward", "embedding", add(now, embedding))
        if made.stays is not None and not spec.model.tie_embeddings:  # a tied one adds to what the head left
            now = add(now, embedding)
    if groups is not None:
        reduced: Bytes = {"communication": groups.root.reduce_input - groups.root.gathered}
        yield Moment("backward", "reduce-scatter of the root", add(now, reduced))
    return now


def _sharded_layers(
    layers: dict[int, Played], now: Bytes, groups: Gathered
) -> Generator[Moment, None, Bytes]:
    """The layers' backward pass under FSDP2, whose buffers come and go between them."""
    reducing = 0
    for layer, played in sorted(layers.items(), reverse=True):
        group = groups.blocks[layer]
        buffers = groups.before(layer).largest + (group.gathered if groups.twice else 0)
        if groups.twice:
            copied_out: Bytes = {"communication": reducing + group.largest + group.gathered}
            yield Moment("backward", "all-gather", add(now, copied_out))
        yield _at(add(now, {"communication": reducing + buffers}), played)
        # All gradients of the group are there, its parameters freed, the input of the last reduce-scatter too. The
        # gradients are copied into the input, then they make room for the output.
        copied: Bytes = {"communication": buffers - group.gathered + group.last_input}
        yield Moment("backward", "reduce-scatter", add(now, played.end, copied))
        reduced: Bytes = {groups.reduced: group.reduce_output}
        gone: Bytes = {"temporary": -played.left}
        yield Moment("backward", "reduce-scatter", add(now, played.end, copied, gone, reduced))
        reducing = group.last_input
        now = add(now, played.end, gone, groups.left(group))
        now = now if groups.twice else add(now, {"communication": -group.gathered})
    return add(now, {"communication": reducing})


def gradients_made(spec: RunSpec, w: Widths, groups: Gathered | None) -> Made:
    """How gradients of weights come about under the run's precision and data parallelism."""
    stored = BYTES[spec.precision.weights]
    if groups is not None:
        passed = w.e_c if spec.precision.recipe is None else stored
        return Made(passed, passed, "temporary")
    mesh = spec.parallelism
    shared = mesh.dp * mesh.ep * mesh.cp > 1
    resident = shared or spec.accumulation > 1 or spec.precision.main_gradients
    return Made(w.e_c if w.casts else stored, stored, None if resident else "gradients")


def loss_forward(spec: RunSpec, w: Widths, stage: Stage) -> Iterator[Bytes]:
    """What the end of a forward pass holds beside what it keeps: copies of weights that autocast keeps until then
    whether autograd needs them or not; logits and their FP32 copy while the log-probabilities are made; before that,
    with tp, the logits' parts as they are gathered."""
    copies: Bytes = {}
    if spec.recompute == "full" and w.casts:
        each = total(layer_copies(spec, w, stage.first))
        copies = {"temporary": each * stage.num_layers}
    if not stage.has_head:
        yield copies
        return
    wide = max(4, w.e_c)
    yield add({"temporary": w.n * w.V * (w.e_c + (wide if wide != w.e_c else 0))}, copies)
    if w.t > 1:
        parts: Bytes = {"temporary": w.n * (w.v + 2 * w.V) * w.e_c, "activations": -w.n * w.V * wide}
        yield add(parts, copies)


def _at(start: Bytes, played: Played) -> Moment:
    return Moment("backward", played.name, add(start, played.rise))
