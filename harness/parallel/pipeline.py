"""Pipeline parallelism: a Transformer cut into stages, and PyTorch's schedules that pass microbatches through them.

    stages = cut(model, mesh, pp_rank)      # before tensor parallelism and sharding, which work on the stages
    pipeline = Pipeline(stages, mesh, group, rows=..., tokens=..., width=..., dtype=...)
    loss = pipeline.run(tokens, targets)    # forward and backward of one micro-step; the mean loss, on every rank

The schedules add up gradients over microbatches; the loss is divided by their number beforehand, so that gradients
are those of the micro-step's mean and may be added up further (torch's own `scale_grads` would divide what earlier
micro-steps left there once more). Shapes are given in advance, so that torch neither sends a pickle nor runs the model
to find them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from harness.ledger.placement import layers_of_stage
from harness.ledger.schedules import Pipeline as Plan
from harness.models.transformer import Transformer, cross_entropy
from harness.spec.parallelism import ParallelismSpec

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

TORCH_CLASSES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zero-bubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}
"""Schedule -> its class in torch.distributed.pipelining."""
Context = Callable[[], AbstractContextManager[Any]]


class AnyStage(nn.Module):
    """What a pipeline passes microbatches through: a module from one tensor to one."""

    number: int
    num_stages: int
    at: Tensor | None = None
    """Positions of the tokens of this pass, where they are not 0, 1, 2 ... (context parallelism)."""
    context: Context = staticmethod(nullcontext)
    """Entered for each forward pass alone: autocast."""

    @property
    def is_first(self) -> bool:
        return self.number == 0

    @property
    def is_last(self) -> bool:
        return self.number == self.num_stages - 1


class Layers(nn.ModuleDict):
    """Blocks under their numbers in the whole model, so that parameters keep its names; iterates over the blocks."""

    def __iter__(self) -> Iterator[nn.Module]:  # type: ignore[override]
        return iter(self.values())


class Stage(AnyStage, Transformer):
    """A stretch of a Transformer: tokens go in at the first stage, the stream between stages, logits come out of the
    last.

    Parameters are the whole model's, under its names. `at` and `context` stand for what a whole model is called with,
    since torch's schedules pass on nothing but the stream.
    """

    def __init__(self, model: Transformer, number: int, num_stages: int) -> None:
        nn.Module.__init__(self)
        self.spec = model.spec
        self.number, self.num_stages = number, num_stages
        held = {
            "embedding": self.is_first,
            "positions": self.is_first,
            "norm": self.is_last,
            "head": self.is_last,
        }
        for part, here in held.items():
            setattr(self, part, getattr(model, part) if here else None)
        blocks = layers_of_stage(model.spec.num_layers, num_stages, number)
        self.layers = Layers({str(block): model.layers[block] for block in blocks})  # type: ignore[assignment]
        self.recompute = model.recompute
        self._rotation = None

    def forward(self, x: Tensor, at: Tensor | None = None) -> Tensor:
        """tokens [batch, tokens] or stream [batch, tokens, d_model] -> stream, or logits [batch, tokens, vocab]."""
        with self.context():
            at = self.at if at is None else at
            if self.is_first:
                x, rotation = self.embed(x, at)
            else:
                rotation = self.rotation_at(x.shape[1], x.device, at)
            for block in self.layers:
                x = self.run_block(block, x, rotation)
            return self.logits(x) if self.is_last else x


def cut(model: Transformer, mesh: ParallelismSpec, pp_rank: int) -> list[Stage]:
    """The stages of one pipeline rank, in order. The other ranks' parts are freed with `model`.

    Raises ValueError where embedding and head are one, or there are fewer layers than stages.
    """
    if model.spec.tie_embeddings:
        raise ValueError(
            f"pp {mesh.pp} puts embedding and head of {model.spec.name} on different ranks, and they are tied"
        )
    if model.spec.num_layers < mesh.num_stages:
        raise ValueError(f"{mesh.num_stages} stages are more than {model.spec.num_layers} layers")
    return [Stage(model, number, mesh.num_stages) for number in mesh.stages_of(pp_rank)]


class Pipeline:
    """One rank's part in passing micro-steps through all stages."""

    def __init__(
        self,
        stages: Sequence[AnyStage],
        mesh: ParallelismSpec,
        group: ProcessGroup | None,
        *,
        rows: int,
        tokens: int,
        width: int,
        dtype: torch.dtype,
        stream_tokens: int | None = None,
        device: torch.device | None = None,
        loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy,
        context: Context = nullcontext,
        control: Context = nullcontext,
    ) -> None:
        """`rows` sequences a micro-step of this data shard, `tokens` of each on this rank; between stages `width`
        values of `dtype` for each of `stream_tokens` (fewer with sequence parallelism; all tokens unless given).
        `group` is the ranks along pp. `context` is entered around each forward pass and the loss (autocast), `control`
        around what is exchanged for the record.
        """
        from torch.distributed import pipelining  # seconds to import

        self.plan = Plan.of(mesh)
        self.num_microbatches = mesh.num_microbatches
        if rows % self.num_microbatches:
            raise ValueError(f"{rows} rows of a micro-step do not make {self.num_microbatches} microbatches")
        self.stages, self.group = list(stages), group
        self._loss, self._context, self._control = loss, context, control
        self._scale = 1.0
        self._device = device or torch.device("cpu")
        self._tokens, self._stream = tokens, (stream_tokens or tokens, width)
        self._dtype = dtype
        microbatch = rows // self.num_microbatches
        for stage in self.stages:
            stage.context = context
        torch_stages = [self._torch_stage(stage, microbatch) for stage in self.stages]
        schedule_class = getattr(pipelining, TORCH_CLASSES[mesh.schedule])
        several = mesh.schedule not in ("gpipe", "1f1b")
        self.schedule = schedule_class(
            torch_stages if several else torch_stages[0],
            n_microbatches=self.num_microbatches,
            loss_fn=self._microbatch_loss,
            scale_grads=False,
        )
        self._first_pass_under_control("_initialize_stages" if several else "_initialize_stage")

    @property
    def holds_first(self) -> bool:
        return any(stage.is_first for stage in self.stages)

    @property
    def holds_last(self) -> bool:
        """Whether the loss is computed on this rank: the last one, or the first one in a V."""
        return any(stage.is_last for stage in self.stages)

    def run(self, tokens: Tensor, targets: Tensor, *, at: Tensor | None = None, scale: float = 1.0) -> Tensor:
        """Forward and backward of one micro-step, gradients of `scale` times its mean loss added up in the stages.

        tokens, targets [rows, tokens] int64, the same on all ranks of the pipeline; `at` [tokens] their positions.
        Returns the mean loss in nats per token (scale left out), FP32 or wider, on every rank of the pipeline.
        """
        self._scale = scale / self.num_microbatches
        for stage in self.stages:
            stage.at = at
        losses: list[Tensor] = []
        # Around the stages' own autocast: microbatches share its copies of weights, and backward passes stay outside.
        with torch.autocast(self._device.type, enabled=False):
            self.schedule.step(
                *((tokens,) if self.holds_first else ()),
                **({"target": targets, "losses": losses} if self.holds_last else {}),
                return_outputs=False,
            )
        return self._share(torch.stack([each.detach() for each in losses]).sum() / scale if losses else None)

    @torch.no_grad()
    def evaluate(self, tokens: Tensor, targets: Tensor, *, at: Tensor | None = None) -> Tensor:
        """The mean loss of a batch without gradients, on every rank: one stage after the other, no microbatches."""
        here = {stage.number: stage for stage in self.stages}
        x, loss = tokens, None
        with self._control():
            for number in range(self.plan.num_stages):
                if number not in here:
                    continue
                if number and number - 1 not in here:
                    x = self._receive(tokens.shape[0], self.plan.rank_of(number - 1))
                here[number].at = at
                x = here[number](x)
                if here[number].is_last:
                    with self._context():
                        loss = self._loss(x, targets).detach()
                elif number + 1 not in here:
                    self._send(x, self.plan.rank_of(number + 1))
        return self._share(loss)

    def _torch_stage(self, stage: AnyStage, rows: int) -> Any:
        """torch's own stage around one of ours; its examples only carry shapes."""
        from torch.distributed.pipelining import PipelineStage

        stream = torch.empty(rows, *self._stream, dtype=self._dtype, device="meta", requires_grad=True)
        tokens = torch.empty(rows, self._tokens, dtype=torch.int64, device="meta")
        return PipelineStage(
            stage,
            stage.number,
            stage.num_stages,
            self._device,
            input_args=tokens if stage.is_first else stream,
            output_args=stream,  # the last stage sends nothing on, so its logits need no shape here
            group=self.group,
        )

    def _microbatch_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        with self._context():
            return self._loss(logits, targets) * self._scale

    def _first_pass_under_control(self, name: str) -> None:
        """torch's stages exchange a word before their first pass, which is no part of a step's communication."""
        initialise = getattr(self.schedule, name)

        def initialise_under_control(*args: Any, **kwargs: Any) -> Any:
            with self._control():
                return initialise(*args, **kwargs)

        setattr(self.schedule, name, initialise_under_control)

    def _share(self, loss: Tensor | None) -> Tensor:
        """The last stage's loss, on every rank of the pipeline."""
        import torch.distributed as dist

        dtype = torch.promote_types(self._dtype, torch.float32)
        known = torch.zeros((), dtype=dtype, device=self._device) if loss is None else loss.to(dtype)
        with self._control():
            dist.broadcast(known, group=self.group, group_src=self.plan.loss_rank)
        return known

    def _send(self, x: Tensor, peer: int) -> None:
        import torch.distributed as dist

        dist.send(x.contiguous(), group=self.group, group_dst=peer)

    def _receive(self, rows: int, peer: int) -> Tensor:
        import torch.distributed as dist

        x = torch.empty(rows, *self._stream, dtype=self._dtype, device=self._device)
        dist.recv(x, group=self.group, group_src=peer)
        return x
