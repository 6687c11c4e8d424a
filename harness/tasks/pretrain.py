"""Pretrain a language model: the plain loop, with everything that varies in the spec.

Order of a step: forward and backward in the compute dtype, unscale, clip, optimizer, then the quantisers' histories.
Validation runs before the first step (step 0) and after the last, in the run's own precision. On several ranks each
runs this loop on its part of the model (harness.parallel.strategy); the first one records.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import torch

from harness import checkpoint
from harness.attention.emulation import emulate
from harness.data.loader import TokenBatches, validation_batches
from harness.data.tokens import load_tokens
from harness.models import ageing, reference, transformer
from harness.optim import adamw, build
from harness.parallel import gather, layout, mesh
from harness.parallel.group import at_step, this_rank
from harness.precision.backends.apply import apply_backend
from harness.precision.cast import implementation_for
from harness.precision.linear import Linear, begin_step, end_step
from harness.precision.loss_scaling import loss_scaler
from harness.precision.operands import carrier_note
from harness.probes.base import ProbeSet, RunContext, StepValues
from harness.run import COMPUTE_DTYPES, Diverged, Quiet, Run
from harness.spec import RunSpec
from harness.tasks.faults import strike
from results.journal import JournalWriter

CALIBRATION_SEED = 977
"""Seed of the ordinary batch that ageing and the first smooth scales are measured on; the same for all seeds."""
HIGH_LOSS_STEPS = 3


def pretrain(spec: RunSpec, request: dict[str, Any], journal: JournalWriter, checkpoints: Path) -> list[Path]:
    """Train as `spec` says, writing to `journal`. Raises Diverged; memory errors pass through.

    Returns the files that may go once the run's end is recorded: its last resume point.
    """
    started = time.perf_counter()
    run = prepare(spec, request, journal if this_rank() == 0 else Quiet(journal), checkpoints)
    first = 1
    if request.get("resume_checkpoint"):
        first = _resume(run, request["resume_checkpoint"]) + 1
    elif spec.val_tokens:
        run.journal.measure(0, {"val_loss": validation_loss(run)})
    probes = ProbeSet(
        RunContext(
            spec=spec,
            model=run.model,
            optimizer=run.optimizer,
            device=run.device,
            record=run.journal,
            strategy=run.strategy,
            rank=this_rank(),
            train_step=lambda step: training_step(run, step),
            validation_loss=lambda: validation_loss(run),
            rare_tokens=run.batches.rare_count,
            first_step=first,
        )
    )
    probes.begin()
    run.journal.measure(0, {"setup_seconds": time.perf_counter() - started})
    seconds, resume_point = _train(run, probes, first, request.get("resume_checkpoint"))
    run.journal.measure(spec.num_steps, {"train_seconds": seconds})
    if spec.val_tokens:
        run.journal.measure(spec.num_steps, {"val_loss": validation_loss(run)})
    probes.finish(spec.num_steps)
    if spec.keep_checkpoint:
        _keep(run)
    return [checkpoint.checkpoint_path(checkpoints, resume_point)] if resume_point else []


def prepare(spec: RunSpec, request: dict[str, Any], journal: JournalWriter | Quiet, checkpoints: Path) -> Run:
    """Data, model on its mesh and optimizer of this rank, ready for the first step."""
    ranks = mesh.build(spec.parallelism, this_rank(), spec.device)
    device = mesh.device_of(ranks)
    corpus = load_tokens(spec.data)
    journal.note("corpus", corpus.corpus, corpus.reason)
    journal.note("corpus_sha256", corpus.sha256, "of the text all tokens come from")
    journal.beat()
    batches = TokenBatches(
        corpus.train,
        batch_size=spec.batch_size,
        seq_len=spec.seq_len,
        seed=spec.seed,
        rare_token_every=spec.data.rare_token_every,
        rare_id=corpus.rare_id,
    )
    validation = validation_batches(
        corpus.validation, batch_size=spec.batch_size, seq_len=spec.seq_len, num_tokens=spec.val_tokens
    )
    model = transformer.build(spec.model, corpus.vocab_size, spec.seed).to(device)
    journal.measure(0, {"num_parameters": sum(p.numel() for p in model.parameters())})
    emulate(model, spec.attention)
    transformer.set_recompute(model, spec.recompute)
    reference.refer(model, spec)
    resumes = bool(request.get("resume_checkpoint"))
    if spec.start_from is not None and not resumes:
        tensors, _ = checkpoint.load_checkpoint(checkpoints, request["start_checkpoint"])
        checkpoint.load_weights(model, tensors)
    calibration = TokenBatches(
        corpus.train, batch_size=max(spec.batch_size, 8), seq_len=spec.seq_len, seed=CALIBRATION_SEED
    ).batch(1)
    if resumes and spec.ageing.kind != "none" and spec.ageing.adam == "invariant":
        ageing.prepare(model)
    elif not resumes:
        _age(spec, model, calibration[0].to(device), corpus.rare_id, journal)
    model.to(COMPUTE_DTYPES[spec.precision.weights])
    _quantize(model, spec, device, journal)
    laid_out = layout.lay_out(model, spec, ranks)
    run = Run(
        spec=spec,
        journal=journal,
        checkpoints=checkpoints,
        device=device,
        model=laid_out.model,
        strategy=laid_out,
        optimizer=build.build(laid_out),
        scaler=loss_scaler(spec.precision, device),
        batches=batches,
        validation=[(inputs.to(device), targets.to(device)) for inputs, targets in validation],
    )
    if not resumes:
        _calibrate_smooth(run, calibration[0].to(device))
    return run


def _quantize(
    model: torch.nn.Module, spec: RunSpec, device: torch.device, journal: JournalWriter | Quiet
) -> None:
    """Put the recipe in, and say what multiplies and what casts."""
    num_linears = len([module for module in model.modules() if isinstance(module, Linear)])
    choice = apply_backend(model, spec.precision, device, spec.seed)
    if spec.attention.is_emulated:
        journal.note(
            "fidelity", "emulated", "attention is the suite's own emulation, whatever multiplies elsewhere"
        )
    if spec.precision.recipe is None:
        return
    kept = num_linears - len(choice.replaced) - len(choice.unfit)
    journal.note("backend", choice.backend, choice.reason)  # what the run's stored fidelity follows
    journal.note(
        "quantized_linears", len(choice.replaced), f"{kept} linears stay unquantised, as the recipe says"
    )
    if choice.backend == "emulated":
        journal.note("product_dtype", *carrier_note(spec.precision))
    if choice.backend != "transformer_engine":
        journal.note("cast_implementation", *implementation_for(device))


def _age(
    spec: RunSpec,
    model: transformer.Transformer,
    inputs: torch.Tensor,
    rare_id: int,
    journal: JournalWriter | Quiet,
) -> None:
    if spec.ageing.kind == "none":
        return
    aged = ageing.age(model, spec.ageing, inputs, rare_id)
    journal.measure(0, {"function_change": aged.function_change})
    journal.note(
        "aged_channels", aged.channels, f"{spec.ageing.name}: SwiGLU channels given outliers, by layer"
    )


@torch.no_grad()
def _calibrate_smooth(run: Run, inputs: torch.Tensor) -> None:
    """Give Smooth-SwiGLU its first channel scales from one forward pass, before any weight is folded."""
    ffns = run.model.feed_forwards()
    if all(ffn.kind != "smooth-swiglu" for ffn in ffns):
        return
    run.model.eval()
    for ffn in ffns:
        ffn.calibrating = True
    with run.strategy.autocast():
        run.model(inputs)
    for ffn in ffns:
        ffn.calibrating = False
    run.model.end_step()


def _train(run: Run, probes: ProbeSet, first: int, resumed_from: str | None) -> tuple[float, str | None]:
    """Steps `first` to the last; returns the seconds spent training and the resume point that is still there."""
    spec, journal = run.spec, run.journal
    run.strategy.train()
    started = saved = time.monotonic()
    last_checkpoint = resumed_from
    high = 0
    for step in range(first, spec.num_steps + 1):
        run.step = step
        probes.before_step(step)
        training_step(run, step, probes)
        journal.beat()  # the ranks that record nothing have no other sign of life
        if not math.isfinite(run.loss):
            on_this_rank = not math.isfinite(float(run.own_loss))
            raise Diverged(f"the loss is {run.loss} at step {step}", on_this_rank=on_this_rank)
        high = high + 1 if spec.limits.loss_above is not None and run.loss > spec.limits.loss_above else 0
        if high >= HIGH_LOSS_STEPS:
            limit = spec.limits.loss_above
            raise Diverged(f"the loss was above {limit} for {high} steps, {run.loss:.4g} at step {step}")
        due = time.monotonic() - saved > spec.checkpoint_every_s and step < spec.num_steps
        if due and spec.num_ranks == 1:  # of several ranks there is no resume point
            last_checkpoint = _save(run, last_checkpoint)
            saved = time.monotonic()
    journal.beat()
    return time.monotonic() - started, last_checkpoint


def training_step(run: Run, step: int, probes: ProbeSet | None = None) -> None:
    """One optimizer step on the batch of `step`; leaves loss, learning rate and gradient norm in `run`."""
    spec, laid_out, optimizer, scaler = run.spec, run.strategy, run.optimizer, run.scaler
    run.learning_rate = adamw.learning_rate(spec.optimizer, step, spec.num_steps)
    for group in optimizer.param_groups:
        group["lr"] = run.learning_rate
    at_step(step, spec.fault)
    inputs, targets = run.batch(step)
    begin_step(run.model, step)
    scale = scaler.get_scale()
    loss = laid_out.forward_backward(inputs, targets, scale, lambda loss: strike(spec.fault, step, loss))
    scaler.unscale_(optimizer)
    run.own_loss = loss
    mean_loss, norm = laid_out.agree(loss)
    run.loss, run.gradient_norm = float(mean_loss), float(norm)
    if probes is not None:
        probes.after_backward(step, run.gradient_norm)
    if spec.optimizer.clip_norm:
        laid_out.clip(spec.optimizer.clip_norm, norm)
    scaler.step(optimizer)
    scaler.update()
    run.num_skipped_steps += scaler.get_scale() < scale
    laid_out.end_step()
    end_step(run.model)
    for part in laid_out.parts:
        part.end_step()
    if probes is not None:
        probes.after_step(step, StepValues(run.loss, run.learning_rate, run.gradient_norm))
        if scaler.is_enabled():
            run.journal.measure(step, {"loss_scale": scale, "num_skipped_steps": run.num_skipped_steps})


@torch.no_grad()
def validation_loss(run: Run) -> float:
    """Mean loss over the held-out batches, in the run's own precision; no scale or history moves."""
    run.strategy.train(False)
    losses = [float(run.strategy.evaluate(inputs, targets)) for inputs, targets in run.validation]
    run.strategy.train()
    return run.strategy.mean(sum(losses) / len(losses))


def _keep(run: Run) -> None:
    """Store the final weights, for runs that start from them."""
    ageing.fold(run.model)  # such runs have no factors beside the weights
    whole = checkpoint.weights(run.model) if run.spec.num_ranks == 1 else gather.weights(run.strategy)
    if this_rank() == 0:
        sha256 = checkpoint.save_checkpoint(run.checkpoints, whole)
        run.journal.checkpoint(run.spec.num_steps, sha256, final=True)


def _save(run: Run, previous: str | None) -> str:
    """A resume point; the journal names it before the one it replaces is deleted."""
    state = {
        "step": run.step,
        "scaler": run.scaler.state_dict(),
        "num_skipped_steps": run.num_skipped_steps,
    }
    sha256 = checkpoint.save_checkpoint(
        run.checkpoints, checkpoint.training_state(run.model, run.optimizer), state
    )
    run.journal.checkpoint(run.step, sha256)
    if previous is not None and previous != sha256:
        checkpoint.checkpoint_path(run.checkpoints, previous).unlink(missing_ok=True)
    return sha256


def _resume(run: Run, sha256: str) -> int:
    tensors, state = checkpoint.load_checkpoint(run.checkpoints, sha256)
    checkpoint.load_training_state(run.model, run.optimizer, tensors)
    if state["scaler"]:
        run.scaler.load_state_dict(state["scaler"])
    run.num_skipped_steps = int(state["num_skipped_steps"])
    step = int(state["step"])
    run.journal.note("resumed", step, f"from checkpoint {sha256[:16]} after step {step}")
    return step
