"""One rank's training step on tensors without data: the real model, laid out and trained by the code of a real run."""

from __future__ import annotations

from typing import Any, cast

import torch

from harness.attention.emulation import emulate
from harness.ledger.step import RankStep
from harness.models import reference, transformer
from harness.optim import build
from harness.parallel import layout, mesh, recorder
from harness.precision.linear import apply_recipe
from harness.precision.loss_scaling import loss_scaler
from harness.run import COMPUTE_DTYPES, Run
from harness.spec import AXES, RunSpec
from harness.spec.parallelism import DENSE, EXPERT
from harness.tasks.pretrain import training_step
from harness.trace.fake import Blank, group_of, without_data
from harness.trace.follow import follow
from harness.trace.summary import rank_step


def trace_rank(spec: RunSpec, vocab_size: int, rank: int = 0) -> RankStep:
    """The second of two steps, when the optimizer has its states."""
    model = _model(spec, vocab_size)
    with group_of(spec.parallelism.num_ranks, rank):
        ranks = _mesh(spec, rank)
        with without_data():
            model.to_empty(device="cpu")
            if spec.model.tie_embeddings:  # each module got a tensor of its own
                model.head.weight = model.embedding.weight
            run = _run(spec, model, ranks)
            training_step(run, 1)
            with recorder.recording() as calls, follow(run.strategy, run.optimizer, run.device) as followed:
                training_step(run, 2)
    collectives = recorder.collectives(calls, spec.parallelism)
    return rank_step(rank, followed.account(), followed.flops, collectives)


def _mesh(spec: RunSpec, rank: int) -> mesh.Mesh:
    """The mesh with all its parts: PyTorch cannot make one among tensors without data."""
    ranks = mesh.build(spec.parallelism, rank)
    for axes in (DENSE, EXPERT, *((axis,) for axis in AXES)):
        if ranks.size(*axes) > 1:
            ranks.over(*axes)
            if spec.parallelism.zero >= 2 and "dp" in axes:
                ranks.shards(*axes)
    return ranks


def _model(spec: RunSpec, vocab_size: int) -> transformer.Transformer:
    """The whole model, on no device."""
    with torch.device("meta"):
        model = transformer.Transformer(spec.model, spec.model.vocab_size or vocab_size)
    emulate(model, spec.attention)
    transformer.set_recompute(model, spec.recompute)
    reference.refer(model, spec)
    for attention in model.attentions():
        attention.narrow_product |= spec.device == "cuda"
    model.to(COMPUTE_DTYPES[spec.precision.weights])
    apply_recipe(model, spec.precision)
    return model


def _run(spec: RunSpec, model: transformer.Transformer, ranks: mesh.Mesh) -> Run:
    laid_out = layout.lay_out(model, spec, ranks, offline=True)
    return Run(
        spec=spec,
        journal=cast("Any", None),
        checkpoints=cast("Any", None),
        device=torch.device("cpu"),
        model=laid_out.model,
        strategy=laid_out,
        optimizer=build.build(laid_out),
        scaler=loss_scaler(spec.precision, torch.device("cpu")),
        batches=cast("Any", Blank(spec.batch_size, spec.seq_len)),
        validation=[],
    )
