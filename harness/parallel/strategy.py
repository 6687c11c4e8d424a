"""How one run trains on its mesh: the model laid out, forward and backward passes, gradients averaged, weights
gathered.

    mesh = mesh.build(spec.parallelism, rank, device)
    strategy = lay_out(model, spec, mesh)       # cuts the model in place
    loss = strategy.forward_backward(inputs, targets)      # a whole batch, of which this rank takes its share
    loss, norm = strategy.agree(loss)
    ...clip, optimizer.step()...
    strategy.end_step()

The model is cut in this order: pipeline stages, tp, experts, context, then the data-parallel wrapper. `lay_out` is
shared by training, by the task `step` and by the trace, whose tensors have no data: nothing in it reads an element, and
with `offline` nothing in it communicates.

Collectives of a step beside those that the modules of a scheme list: loss and gradient norm, one all_reduce of two
FP64 numbers over all ranks (axis `control`); with loss scaling one more of one FP32 number; with delayed scales one of
the largest elements, FP32, one a quantiser, over all ranks (harness.precision.scaling). With accumulation DDP averages
in the last micro-step alone, FSDP2 in each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from harness.ledger.schedules import splits_backward
from harness.models.transformer import Transformer, cross_entropy
from harness.parallel import norm, recorder, replicate, tensor, zero
from harness.parallel.mesh import DENSE, EXPERT, Mesh
from harness.run import COMPUTE_DTYPES
from harness.spec import RunSpec

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.nn.parallel import DistributedDataParallel

    from harness.parallel.pipeline import Pipeline


@dataclass
class Strategy:
    """One rank's part of the model and how it is trained."""

    spec: RunSpec
    mesh: Mesh
    model: Transformer
    """The model; with a pipeline the rank's first stage."""
    parts: list[Transformer]
    """What of it lies on this rank: the model, or its stages."""
    shapes: dict[str, torch.Size]
    """Parameters of the whole model, in order."""
    wrapped: DistributedDataParallel | None = None
    flat: list[replicate.FlatGradients] = field(default_factory=list)
    pipeline: Pipeline | None = None
    at: Tensor | None = None
    """Positions of this rank's tokens, where they are not 0, 1, 2 ..."""
    _settled: bool = field(default=False, init=False)
    _named: list[tuple[str, nn.Parameter]] = field(default_factory=list, init=False)

    # What there is

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """(name in the whole model, this rank's part of it: plain, or a DTensor under FSDP2)."""
        if not self._named:
            self._named = [each for part in self.parts for each in part.named_parameters()]
        return self._named

    def replicated(
        self, named: list[tuple[str, nn.Parameter]]
    ) -> list[tuple[list[tuple[str, nn.Parameter]], ProcessGroup | None]]:
        """Parameters by the ranks that hold the same: dense ones, then experts that ep shares out; None for this one
        alone."""
        dealt = [each for each in named if self.mesh.spec.ep > 1 and norm.is_expert(each[0])]
        names = {name for name, _ in dealt}
        dense = [each for each in named if each[0] not in names]
        return [
            (part, self.mesh.group(*axes) if self.mesh.size(*axes) > 1 else None)
            for part, axes in ((dense, DENSE), (dealt, EXPERT))
        ]

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """(name, this rank's part of the gradient) of the parameters that have one."""
        for name, parameter in self.named_parameters():
            gradient = self.gradient(parameter)
            if gradient is not None:
                yield name, zero.local(gradient)

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """What the optimizer reads: the FP32 main gradient where there is one, else the parameter's own."""
        for flat in self.flat:
            if flat.widened and (main := flat.gradient(parameter)) is not None:
                return main
        return parameter.grad

    def autocast(self) -> AbstractContextManager[None]:
        """The compute dtype of matrix products, unless FSDP2's own mixed precision gives it."""
        precision = self.spec.precision
        dtype, weights = COMPUTE_DTYPES[precision.compute], COMPUTE_DTYPES[precision.weights]
        sharded = self.spec.parallelism.zero >= 2 and self.mesh.size(*DENSE) > 1
        if dtype == weights or (sharded and zero.keeps_policy(precision)):
            return nullcontext()
        return torch.autocast(self.mesh.device_type, dtype=dtype)

    # A step

    def train(self, mode: bool = True) -> None:
        """Training or evaluation, for all that lies here."""
        for part in self.parts:
            part.train(mode)

    def forward_backward(
        self,
        inputs: Tensor,
        targets: Tensor,
        scale: float = 1.0,
        strike: Callable[[Tensor], None] | None = None,
    ) -> Tensor:
        """Gradients of `scale` times the mean loss over the batch [batch_size, tokens], in every rank's parameters.

        Returns the mean loss over this rank's share, detached. `strike` is shown each micro-step's loss before its
        backward pass (faults).
        """
        inputs, targets = self._own(inputs), self._own(targets)
        count = self.spec.accumulation
        for mixture in (each for part in self.parts for each in part.mixtures()):
            mixture.loss_scale = scale / (count * self.spec.parallelism.num_microbatches)
        total: Tensor | None = None
        for index, (x, y) in enumerate(zip(inputs.chunk(count), targets.chunk(count), strict=True)):
            loss = self._micro_step(x, y, scale / count, index == count - 1, strike)
            total = loss if total is None else total + loss
        self._finish_gradients()
        assert total is not None
        return total / count if count > 1 else total

    def _micro_step(
        self, x: Tensor, y: Tensor, scale: float, last: bool, strike: Callable[[Tensor], None] | None
    ) -> Tensor:
        if self.pipeline is not None:
            loss = self.pipeline.run(x, y, at=self.at, scale=scale)
            if strike is not None:
                strike(loss)
            return loss
        with nullcontext() if last or self.wrapped is None else self.wrapped.no_sync():
            with self.autocast():
                loss = self._loss(x, y)
            if strike is not None:
                strike(loss)
            (loss if scale == 1 else loss * scale).backward()
        return loss.detach()

    def _loss(self, x: Tensor, y: Tensor) -> Tensor:
        if self.wrapped is None:
            return self.model.loss(x, y, *self._positions())
        return cross_entropy(self.wrapped(x, *self._positions()), y)

    def _positions(self) -> tuple[Tensor, ...]:
        return () if self.at is None else (self.at,)

    def _own(self, batch: Tensor) -> Tensor:
        rows = self.mesh.share(batch)
        return rows if self.spec.parallelism.cp == 1 or self.at is None else rows[:, self.at]

    def _finish_gradients(self) -> None:
        """What the wrappers leave to be added up, once a step."""
        for flat in self.flat:
            flat.reduce()
        mesh = self.mesh.spec
        if mesh.zero >= 2 and mesh.ep > 1 and self.mesh.size(*EXPERT) > 1:
            # FSDP2 averaged over dp and cp; the tokens came from ep times as many ranks.
            experts = [gradient for name, gradient in self.gradients() if norm.is_expert(name)]
            if experts:
                torch._foreach_mul_(experts, 1 / mesh.ep)
        if mesh.tp > 1:
            partial = [g for name, g in self.gradients() if tensor.is_partial(name, mesh.sequence_parallel)]
            tensor.add_up_partial(partial, self.mesh)

    @torch.no_grad()
    def agree(self, loss: Tensor) -> tuple[Tensor, Tensor]:
        """(mean loss over the global batch, gradient norm over all parameters), the same on every rank."""
        if self.mesh.devices is None:
            return loss, torch.nn.utils.get_total_norm([gradient for _, gradient in self.gradients()])
        import torch.distributed as dist

        square = norm.squared_norm(self.gradients(), self.mesh)
        both = torch.stack([loss.double(), square.to(loss.device)])
        with recorder.control():
            dist.all_reduce(both)
        return both[0] / self.mesh.spec.num_ranks, both[1].sqrt()

    @torch.no_grad()
    def clip(self, limit: float, gradient_norm: Tensor) -> None:
        """Scale all gradients so that their norm is at most `limit`, as torch.nn.utils.clip_grads_with_norm_ does."""
        gradients = [gradient for _, gradient in self.gradients()]
        if gradients:
            torch._foreach_mul_(gradients, (limit / (gradient_norm + 1e-6)).clamp(max=1.0))

    def end_step(self) -> None:
        """After the optimizer: forget the gradients."""
        for _, parameter in self.named_parameters():
            parameter.grad = None
        for flat in self.flat:
            flat.clear()
        if self.wrapped is not None and not self._settled:
            replicate.settle(self.wrapped)
            self._settled = True

    @torch.no_grad()
    def evaluate(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of a batch, over this rank's share of it or the whole where it does not divide."""
        if len(inputs) % self.mesh.spec.data_shards == 0:
            inputs, targets = self.mesh.share(inputs), self.mesh.share(targets)
        if self.mesh.spec.cp > 1 and self.at is not None:
            inputs, targets = inputs[:, self.at], targets[:, self.at]
        with recorder.paused():
            if self.pipeline is not None:
                loss = self.pipeline.evaluate(inputs, targets, at=self.at)
            else:
                with self.autocast():
                    loss = self.model.loss(inputs, targets, *self._positions())
            for part in self.parts:
                zero.reshard(part)
        return loss

    def mean(self, value: float) -> float:
        """The mean of a number over all ranks."""
        if self.mesh.devices is None:
            return value
        import torch.distributed as dist

        shared = torch.tensor(value, dtype=torch.float64, device=self.device)
        with recorder.control():
            dist.all_reduce(shared)
        return float(shared) / self.mesh.spec.num_ranks

    @property
    def device(self) -> torch.device:
        return zero.local(next(self.parts[0].parameters())).device


def lay_out(model: Transformer, spec: RunSpec, mesh: Mesh, offline: bool = False) -> Strategy:
    """Cut `model`, built whole and in the weights' dtype, to this rank's part. Raises ValueError where it cannot be
    cut.

    `offline`: without communication while laying out (DDP compares its ranks' models), so that a fake process group
    will do; DDP's place is then taken by buffers of the same bytes.
    """
    parallelism, precision = spec.parallelism, spec.precision
    _check(spec)
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

            context.apply(part, mesh.group("cp"), parallelism.context)
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


def _check(spec: RunSpec) -> None:
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
