"""How one rank takes part in a training step: forward and backward passes, gradients averaged, loss and norm agreed
on.

    mesh = mesh.build(spec.parallelism, rank, device)
    strategy = layout.lay_out(model, spec, mesh)       # cuts the model in place
    loss = strategy.forward_backward(inputs, targets)      # a whole batch, of which this rank takes its share
    loss, norm = strategy.agree(loss)
    ...clip, optimizer.step()...
    strategy.end_step()

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

from harness.ledger.traffic.tensor import is_partial
from harness.models.transformer import Transformer, cross_entropy
from harness.parallel import norm, recorder, replicate, tensor, zero
from harness.parallel.mesh import Mesh
from harness.run import COMPUTE_DTYPES
from harness.spec import RunSpec
from harness.spec.parallelism import DENSE, EXPERT

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
            partial = [g for name, g in self.gradients() if is_partial(name, mesh.sequence_parallel)]
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
