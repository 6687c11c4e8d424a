"""Meshes that a run cannot be laid over, and why.

What each axis shares out must divide evenly, so that all ranks compute as many tokens with as many weights: then the
loss and the gradients are the same mean whatever the mesh, and a difference between two meshes is a mistake.
"""

from __future__ import annotations

from collections.abc import Iterator

from harness.data.vocabulary import vocab_size
from harness.ledger.schedules import schedule_problem, splits_backward
from harness.ledger.transfers import MOST_STAGES_KEPT
from harness.spec import RunSpec
from harness.spec.parallelism import AXES, ParallelismSpec


def mesh_problems(spec: RunSpec) -> list[str]:
    """Why `spec` cannot be laid over its mesh; empty when it can."""
    if spec.task == "pipeline":
        return [*_ranks(spec.parallelism), *_stages_alone(spec.parallelism), *_schedule(spec.parallelism)]
    return [
        *_ranks(spec.parallelism),
        *_tensor(spec),
        *_layers(spec),
        *_schedule(spec.parallelism),
        *_context(spec),
        *_experts(spec),
        *_batch(spec),
        *_together(spec),
    ]


def _ranks(mesh: ParallelismSpec) -> Iterator[str]:
    if mesh.ranks and mesh.num_ranks != mesh.ranks:
        made = "1 rank" if mesh.num_ranks == 1 else f"{mesh.num_ranks} ranks"
        yield f"{axes_text(mesh)} makes {made}, not {mesh.ranks}"


def _stages_alone(mesh: ParallelismSpec) -> Iterator[str]:
    """Stages that sleep have nothing for another axis to share out."""
    if mesh.num_ranks != mesh.pp:
        yield f"task pipeline lays its stages along pp alone, got {axes_text(mesh)}"


def axes_text(mesh: ParallelismSpec) -> str:
    """`dp 8 · tp 4`: the axes that have more than one rank."""
    return " · ".join(f"{axis} {mesh.size(axis)}" for axis in AXES if mesh.size(axis) > 1) or "the mesh"


def _tensor(spec: RunSpec) -> Iterator[str]:
    """Whole heads, columns and vocabulary entries on each rank."""
    model, mesh = spec.model, spec.parallelism
    shared = {
        "num_heads": model.num_heads,
        "num_kv_heads": model.num_kv_heads,
        "d_ffn": model.d_ffn,
        "vocab_size": model.vocab_size or vocab_size(spec.data.tokenizer),
    }
    for name, size in shared.items():
        if size % mesh.tp:
            whose = (
                f"tokenizer {spec.data.tokenizer}"
                if name == "vocab_size" and not model.vocab_size
                else model.name
            )
            yield f"tp {mesh.tp} does not divide {name} {size} of {whose}"
    if mesh.sequence_parallel and spec.seq_len // mesh.cp % mesh.tp:
        yield f"sequence_parallel: tp {mesh.tp} does not divide the {spec.seq_len // mesh.cp} tokens of a sequence"


def _layers(spec: RunSpec) -> Iterator[str]:
    """At least one layer a stage; where they do not divide, the first stages have one more."""
    model, mesh = spec.model, spec.parallelism
    if model.num_layers >= mesh.num_stages:
        return
    stages = f"pp {mesh.pp}"
    if mesh.local_stages > 1:
        stages += f" with {mesh.local_stages} stages a rank makes {mesh.num_stages} stages, which"
    yield f"{stages} is more than num_layers {model.num_layers} of {model.name}"


def _schedule(mesh: ParallelismSpec) -> Iterator[str]:
    if mesh.pp > 1:
        problem = schedule_problem(mesh.schedule, mesh.pp, mesh.num_microbatches, mesh.local_stages)
        if problem:
            yield problem


def _context(spec: RunSpec) -> Iterator[str]:
    """A rank has pieces i and 2 cp - 1 - i of 2 cp, so that a causal mask loads all ranks alike."""
    cp = spec.parallelism.cp
    if cp > 1 and spec.seq_len % (2 * cp):
        yield f"cp {cp}: seq_len {spec.seq_len} is no multiple of {2 * cp} (twice cp)"


def _experts(spec: RunSpec) -> Iterator[str]:
    model, ep, tp, cp = spec.model, spec.parallelism.ep, spec.parallelism.tp, spec.parallelism.cp
    if model.moe is not None and tp > 1:
        yield f"tp {tp} cuts no experts; those of {model.name} are shared out by ep"
    if model.moe is not None and model.moe.capacity_factor and cp > 1:
        yield f"cp {cp} cuts sequences, and the experts' capacity is of a whole one; capacity_factor 0 drops none"
    if ep == 1:
        return
    if model.moe is None:
        yield f"ep {ep}: {model.name} has no experts to share out"
    elif model.moe.experts % ep:
        yield f"ep {ep} does not divide the {model.moe.experts} experts of {model.name}"


def _batch(spec: RunSpec) -> Iterator[str]:
    mesh = spec.parallelism
    microbatches = "microbatches" if mesh.microbatches else "microbatches (twice pp)"
    factors = {
        "dp": mesh.dp,
        "ep": mesh.ep,
        "accumulation": spec.accumulation,
        microbatches: mesh.num_microbatches,
    }
    parts = 1
    for factor in factors.values():
        parts *= factor
    if mesh.num_ranks == 1 or spec.batch_size % parts == 0:
        return
    named = [f"{name} {factor}" for name, factor in factors.items() if factor > 1]
    if len(named) == 1:
        yield f"{named[0]} does not divide batch_size {spec.batch_size}"
    else:
        yield f"batch_size {spec.batch_size} is no multiple of {parts} = {' · '.join(named)}"


def _together(spec: RunSpec) -> Iterator[str]:
    model, mesh = spec.model, spec.parallelism
    if mesh.zero and mesh.dp * mesh.ep * mesh.cp == 1:
        yield f"zero {mesh.zero} shards over dp, ep and cp, and they have one rank between them"
    if mesh.cp > 1 and mesh.context == "native" and spec.device == "cpu":
        yield "context native: PyTorch's context parallelism has no kernels for a CPU; ring and all-gather run there"
    if mesh.cp > 1 and spec.attention.kernel == "eager":
        yield f"cp {mesh.cp} computes the softmax product piece by piece; attention kernel eager keeps it whole"
    if mesh.pp > 1 and model.tie_embeddings:
        yield f"pp {mesh.pp} puts embedding and head of {model.name} on different ranks, and they are tied"
    if mesh.pp > 1 and splits_backward(mesh.schedule) and spec.recompute == "full":
        yield (
            f"schedule {mesh.schedule} splits the backward pass, and with recompute full PyTorch computes a stage's "
            "layers anew for each group of its weights; selective or none do"
        )
    if mesh.pp > 1 and mesh.zero >= 2 and mesh.local_stages > MOST_STAGES_KEPT:
        yield (
            f"zero {mesh.zero} in a pipeline keeps at most {MOST_STAGES_KEPT} stages a rank gathered; "
            f"got stages_per_rank {mesh.local_stages}"
        )


def not_carried_out(spec: RunSpec) -> str | None:
    """Why this suite trains no such run on its mesh, though there may be one; None where it does.

    A case may hold it, to say what a paper did: the run is skipped with this reason.
    """
    model, mesh = spec.model, spec.parallelism
    if spec.num_ranks == 1:
        return None
    found = []
    if model.ffn.startswith("smooth"):
        found.append(f"ffn {model.ffn} takes its scales from the whole batch and runs on one rank")
    if spec.ageing.kind != "none":
        found.append(f"ageing {spec.ageing.name} is put into a whole model and runs on one rank")
    if spec.attention.is_emulated:
        found.append(f"the emulated attention kernel {spec.attention.kernel} runs on one rank")
    if mesh.zero == 3 and mesh.pp > 1 and splits_backward(mesh.schedule):
        found.append(
            f"schedule {mesh.schedule} splits the backward pass, in which PyTorch's FSDP2 with zero 3 loses gradients; "
            "zero 2 trains right"
        )
    if mesh.zero >= 2 and spec.precision.main_gradients:
        found.append(f"zero {mesh.zero} (FSDP2) keeps gradients in the weights' dtype, no main gradients")
    if spec.optimizer.name == "muon" and mesh.tp > 1:
        found.append(f"Muon orthogonalises whole matrices, and tp {mesh.tp} leaves a part of each on a rank")
    cut = [axis for axis in AXES if axis != "dp" and mesh.size(axis) > 1]
    if spec.precision.recipe is not None and cut:
        found.append(
            f"casts of precision {spec.precision.name} go with dp and zero, not with {', '.join(cut)}"
        )
    return "; ".join(found) or None
