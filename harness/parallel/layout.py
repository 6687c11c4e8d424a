"""The model of a run cut to one rank's part, on its mesh.

In this order: pipeline stages, tp, experts, context, then the data-parallel wrapper. Shared by training, by the task
`step` and by the trace, whose tensors have no data: nothing here reads an element, and with `offline` nothing here
communicates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from harness.ledger.schedules import splits_backward
from harness.models.transformer import Transformer
from harness.parallel import norm, recorder, replicate, tensor, zero
from harness.parallel.mesh import Mesh
from harness.parallel.strategy import Strategy
from harness.run import COMPUTE_DTYPES
from harness.spec import RunSpec
from harness.spec.parallelism import DENSE, EXPERT

if TYPE_CHECKING:
    from harness.parallel.pipeline import Pipeline


def lay_out(model: Transformer, spec: RunSpec, mesh: Mesh, offline: bool = False) -> Strategy:
    """Cut `model`, built whole and in the weights' dtype, to this rank's part. Raises ValueError where it cannot be
    cut.

    `offline`: without communication while laying out (DDP compares its ranks' models), so that a fake process group
    will do; DDP's place is then taken by buffers of the same bytes.
    """
    parallelism, precision = spec.parallelism, spec.precision
    check(spec)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    parts = [model]
    if parallelism.pp > 1:
        from harness.parallel import pipeline

        parts = list(pipeline.cut(model, parallelism, mesh.place["pp"]))
    for part in parts:
        if parallelism.tp > 1:
            tensor.apply(part, mesh)
        if spec.model.moe is not None:
            from harness.parallel import experts

            experts.shard(part, mesh)
        if parallelism.cp > 1:
            from harness.parallel import context

            context.apply(part, mesh.over("cp"), parallelism.context)
    strategy = Strategy(spec, mesh, parts[0], parts, shapes)
    strategy.at = _positions(spec, mesh, next(parts[0].parameters()).device)
    if parallelism.zero >= 2:
        for part in parts:
            zero.shard(part, mesh, precision, parallelism.zero == 3)
        if parallelism.ep > 1 and mesh.size(*EXPERT) == 1:
            # Its experts lie on one rank each: nothing to shard or to average.
            apart = [p for name, p in strategy.named_parameters() if norm.is_expert(name)]
            strategy.flat.append(replicate.FlatGradients(apart, None, mesh.size(*DENSE)))
    else:
        _replicate(strategy, offline)
    if parallelism.pp > 1:
        strategy.pipeline = _pipeline(strategy)
    return strategy


def check(spec: RunSpec) -> None:
    """Raises ValueError, with the reason, where the run cannot be laid over its mesh rightly."""
    parallelism = spec.parallelism
    if spec.batch_size % (parallelism.data_shards * spec.accumulation):
        raise ValueError(
            f"batch_size {spec.batch_size} does not divide over {parallelism.data_shards} data shards "
            f"and {spec.accumulation} micro-steps"
        )
    if parallelism.sequence_parallel and spec.seq_len // parallelism.cp % parallelism.tp:
        raise ValueError(f"sequence_parallel: {spec.seq_len} tokens do not divide over tp {parallelism.tp}")
    if spec.precision.main_gradients and parallelism.zero >= 2:
        raise ValueError(
            "FSDP2 (zero 2 and 3) keeps gradients in the weights' dtype; main_gradients has no place"
        )
    if parallelism.zero == 3 and parallelism.pp > 1 and splits_backward(parallelism.schedule):
        raise ValueError(
            f"{parallelism.schedule} splits the backward pass, in which FSDP2 frees and gathers weights again: "
            "PyTorch then loses gradients without a word; use zero 2"
        )
    if spec.precision.recipe is not None and parallelism.num_ranks > parallelism.dp:
        raise ValueError("a recipe's casts see whole matrices; it goes with dp and zero alone")


def _positions(spec: RunSpec, mesh: Mesh, device: torch.device) -> Tensor | None:
    parallelism = spec.parallelism
    if parallelism.cp > 1:
        from harness.parallel import context

        return context.local_positions(spec.seq_len, parallelism.cp, mesh.place["cp"]).to(device)
    if parallelism.sequence_parallel and parallelism.pp > 1:
        return torch.arange(spec.seq_len, device=device)  # a later stage sees its part of the stream alone
    return None


def _replicate(strategy: Strategy, offline: bool) -> None:
    """DDP, or buffers of our own for what it does not do."""
    mesh, spec = strategy.mesh, strategy.spec
    main = torch.float32 if spec.precision.main_gradients else None
    ranks = mesh.size(*DENSE)
    (dense, group), (experts, experts_group) = strategy.replicated(list(strategy.named_parameters()))
    if experts:
        parameters = [parameter for _, parameter in experts]
        strategy.flat.append(replicate.FlatGradients(parameters, experts_group, ranks, main))
    if group is None and main is None:
        return
    parameters = [parameter for _, parameter in dense]
    if group is None or mesh.spec.pp > 1 or main is not None:
        strategy.flat.append(replicate.FlatGradients(parameters, group, ranks, main))
    elif offline:
        strategy.flat.append(replicate.Buckets(parameters, group, ranks, spec.accumulation))
    else:
        strategy.wrapped = replicate.ddp(strategy.model, group, [name for name, _ in experts])


def _pipeline(strategy: Strategy) -> Pipeline:
    from harness.parallel import pipeline

    spec, mesh = strategy.spec, strategy.mesh
    precision = spec.precision
    tokens = spec.seq_len // spec.parallelism.cp
    narrow = spec.parallelism.zero >= 2 and mesh.size(*DENSE) > 1 and zero.keeps_policy(precision)
    return pipeline.Pipeline(
        strategy.parts,  # type: ignore[arg-type]
        spec.parallelism,
        mesh.group("pp"),
        rows=spec.batch_size // (spec.parallelism.data_shards * spec.accumulation),
        tokens=tokens,
        width=spec.model.d_model,
        stream_tokens=tokens // spec.parallelism.tp if spec.parallelism.sequence_parallel else None,
        dtype=COMPUTE_DTYPES[precision.compute if narrow else precision.weights],
        device=strategy.device,
        context=strategy.autocast,
        control=recorder.control,
    )
