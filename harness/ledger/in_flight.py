"""A pipeline rank's memory over its schedule: which microbatches are in flight, and what each pass adds to them.

The rank's actions (harness.ledger.schedules) are played in order. A forward pass adds what its stage keeps of a
microbatch, the stage's output until it is sent and gone through backward, and on the last stage the logits; a
backward pass rises above what is then in flight and takes its own away. torch receives into buffers that are made
once: for every microbatch one of b s h values on each stage that has one before it, and one on each that has one
after it. GPipe lets go of outputs at the end of the step only; 1F1B one microbatch late. Autocast's copies of
weights are shared by all microbatches and stay for the whole pass; since they were made in the first one's forward
pass, the backward passes of the others come to them last, and hold all gradients of weights in the products' dtype
till then.

Where a schedule splits the backward pass, its first half leaves the inputs and the output gradients of linears for
the second (an estimate).
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import replace

from harness.ledger.activations import head_copies, layer_copies, stage_activations
from harness.ledger.backward import Made
from harness.ledger.gathered import Gathered, gathered
from harness.ledger.moments import Moment, gradients_made, loss_forward, stage_backward
from harness.ledger.placement import Stage, stages
from harness.ledger.schedules import Pipeline, order
from harness.ledger.states import states
from harness.ledger.tape import Bytes, add, nothing, scaled
from harness.ledger.terms import total
from harness.ledger.widths import Widths, widths
from harness.spec import RunSpec


def pipeline_moments(spec: RunSpec, vocab_size: int | None, rank: int) -> Iterator[Moment]:
    """The moments of one micro-step of a pipeline rank."""
    mesh = spec.parallelism
    at = mesh.place(rank)["pp"]
    whole = widths(spec, vocab_size)
    held = dict(zip(mesh.stages_of(at), stages(spec, at), strict=True))
    copies = sum(_copies(spec, whole, stage) for stage in held.values())
    groups = gathered(spec, vocab_size, rank)
    lying = states(spec, vocab_size, rank)
    first = gradients_made(spec, whole, groups)
    later = Made(whole.e_c, whole.e_c, "temporary") if whole.casts else Made(first.made_e, first.e, None)
    w = replace(whole, casts=False)
    now = add(
        {"weights": lying.weights, "optimizer": lying.optimizer},
        {"communication": _buffers(spec, w, held) + (groups.at_loss if groups else 0)},
        {"gradients": lying.gradients if first.stays is None or (groups and groups.added) else 0},
        {"temporary": _unreduced(groups), "activations": copies},
    )
    if groups is not None:
        first = later
    kept = {number: _kept(spec, w, stage) for number, stage in held.items()}
    ends = {number: _longest(spec, w, stage, first, later) for number, stage in held.items()}
    begun: set[int] = set()
    late = nothing()
    for kind, number, _ in order(Pipeline.of(mesh), at):
        stage = held[number]
        if kind == "F":
            now = add(now, kept[number])
            for passing in loss_forward(spec, w, stage):
                yield Moment("forward", "stage", add(now, passing))
            continue
        if kind == "W":
            now = add(now, scaled(_for_weights(spec, w, stage), -1))
            continue
        rise, left = ends[number][number in begun]
        yield Moment("backward", rise.name, add(now, late, rise.held))
        begun.add(number)
        gone = scaled(kept[number], -1)
        if mesh.schedule != "1f1b":
            gone = add(gone, {"activations": _output(w, stage)})
        else:
            late = {"activations": 0 if stage.has_head else _output(w, stage)}
        now = add(now, gone, left, _for_weights(spec, w, stage) if kind == "I" else {})


def saved_in_flight(spec: RunSpec, vocab_size: int | None, rank: int) -> int:
    """Bytes kept for the backward pass when most is in flight, what was received among them."""
    mesh = spec.parallelism
    at = mesh.place(rank)["pp"]
    whole = widths(spec, vocab_size)
    w = replace(whole, casts=False)
    copies = sum(_copies(spec, whole, stage) for stage in stages(spec, at))
    kept = {
        number: sum(_kept(spec, w, stage).values()) + (0 if stage.has_embedding else w.m * w.h * w.e_s)
        for number, stage in zip(mesh.stages_of(at), stages(spec, at), strict=True)
    }
    now = most = copies
    for kind, number, _ in order(Pipeline.of(mesh), at):
        now += kept[number] if kind == "F" else 0 if kind == "W" else -kept[number]
        most = max(most, now)
    return most


def _kept(spec: RunSpec, w: Widths, stage: Stage) -> Bytes:
    """What a forward pass leaves: activations and the stage's output. The input of the first block is the buffer
    that it was received into."""
    received = w.m * w.h * w.e_s if spec.recompute == "full" and not stage.has_embedding else 0
    return add({"activations": stage_activations(spec, w, stage).saved + _output(w, stage) - received})


def _output(w: Widths, stage: Stage) -> int:
    return w.n * w.V * w.e_c if stage.has_head else w.m * w.h * w.e_s


def _buffers(spec: RunSpec, w: Widths, held: dict[int, Stage]) -> int:
    each = spec.parallelism.num_microbatches * w.m * w.h * w.e_s
    return each * sum((not stage.has_embedding) + (not stage.has_head) for stage in held.values())


def _longest(
    spec: RunSpec, w: Widths, stage: Stage, first: Made, later: Made
) -> tuple[tuple[Moment, Bytes], tuple[Moment, Bytes]]:
    """The largest rise of a backward pass and the gradients that it leaves: of the first microbatch, of a later
    one."""
    found = []
    for made in (first, later):
        rises: list[Moment] = []
        end = _collect(stage_backward(spec, w, stage, made, nothing()), rises)
        left: Bytes = {"gradients": end["gradients"]} if made.stays == "gradients" else {}
        found.append((max(rises, key=lambda moment: moment.total), left))
    return found[0], found[1]


def _collect(moments: Generator[Moment, None, Bytes], into: list[Moment]) -> Bytes:
    """All moments, and what the generator returns."""
    while True:
        try:
            into.append(next(moments))
        except StopIteration as end:
            found: Bytes = end.value
            return found


def _copies(spec: RunSpec, w: Widths, stage: Stage) -> int:
    """Autocast's copies of a stage's weights."""
    if not w.casts:
        return 0
    layers = total(layer_copies(spec, w, stage.first)) * stage.num_layers
    return layers + (total(head_copies(spec, w)) if stage.has_head else 0)


def _unreduced(groups: Gathered | None) -> int:
    """FSDP2 adds gradients up unsharded over the microbatches, in the dtype they are reduced in."""
    if groups is None:
        return 0
    return groups.root.reduce_input + sum(group.reduce_input for group in groups.blocks.values())


def _for_weights(spec: RunSpec, w: Widths, stage: Stage) -> Bytes:
    """Inputs and output gradients of a stage's linears."""
    up = w.f if spec.model.ffn == "gelu" else 2 * w.f
    layer = w.n * (4 * w.h + 2 * w.q + 2 * w.k + w.f + up) * w.e_c
    head = w.n * (w.h + w.V) * w.e_c if stage.has_head else 0
    return {"activations": stage.num_layers * layer + head}
