"""Data parallelism with whole parameters on every rank: DDP, and gradients in a buffer of our own where DDP cannot go.

DDP: per step, on the last micro-step (the others run under no_sync), one all_reduce over dp+ep+cp a bucket; payload in
all the gradients' bytes. A bucket is closed once it holds 1 MiB (the first) or 25 MiB (the others) of gradients in the
order that the backward pass finishes them, so the number of calls is that of buckets. Buffers are not broadcast.

FlatGradients: one all_reduce a dtype after the backward pass, the same bytes. For a pipeline's stages (the schedule's
split backward passes are not DDP's), for experts (their ranks are not those of the dense parameters) and for FP32 main
gradients of BF16 weights (4 bytes a parameter).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from harness.parallel import recorder

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.nn.parallel import DistributedDataParallel


def ddp(part: nn.Module, group: ProcessGroup, left_out: Sequence[str] = ()) -> DistributedDataParallel:
    """`part` under DDP; parameters named in `left_out` are not its business. Set-up collectives are not recorded."""
    from torch.nn.parallel import DistributedDataParallel

    if left_out:
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(part, list(left_out))
    named = inspect.signature(DistributedDataParallel.__init__).parameters
    # 2.13 renamed the second option.
    sync = "forward_sync_buffers" if "forward_sync_buffers" in named else "broadcast_buffers"
    options: Any = {"gradient_as_bucket_view": True, sync: False}
    with recorder.paused():
        return DistributedDataParallel(part, process_group=group, **options)


def settle(wrapped: DistributedDataParallel) -> None:
    """After DDP's first step: let it order its buckets as gradients came, which it would do in the next step's
    forward."""
    reducer: Any = wrapped.reducer
    with recorder.paused():
        reducer._rebuild_buckets()


class FlatGradients:
    """Gradients of some parameters in one buffer a dtype, averaged over a group by one all_reduce each."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        group: ProcessGroup | None,
        divide_by: int,
        dtype: torch.dtype | None = None,
    ) -> None:
        """`divide_by`: what the sum over `group` is divided by. `dtype`: of the buffer, where it is wider than the
        parameters': each micro-step's gradients are then added to it and freed, and the optimizer reads `gradient`."""
        self.group, self.divide_by = group, divide_by
        self.widened = dtype is not None
        self._views: dict[nn.Parameter, Tensor] = {}
        self.buffers: list[Tensor] = []
        for kind in dict.fromkeys(parameter.dtype for parameter in parameters):
            same = [parameter for parameter in parameters if parameter.dtype == kind]
            total = sum(parameter.numel() for parameter in same)
            buffer = torch.zeros(total, dtype=dtype or kind, device=same[0].device)
            views = buffer.split([parameter.numel() for parameter in same])
            self._views |= {p: view.view_as(p) for p, view in zip(same, views, strict=True)}
            self.buffers.append(buffer)
        if self.widened:
            for parameter in self._views:
                parameter.register_post_accumulate_grad_hook(self._add)
        self.clear()

    def _add(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self._views[parameter].add_(parameter.grad)  # type: ignore[index]
        parameter.grad = None

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """The parameter's part of the buffer; None where it is not in here."""
        return self._views.get(parameter)

    def clear(self) -> None:
        """Zero the buffers and make them the parameters' gradients, which the backward pass adds to."""
        for buffer in self.buffers:
            buffer.zero_()
        if not self.widened:
            for parameter, view in self._views.items():
                parameter.grad = view

    def reduce(self) -> None:
        """Average over the group, in place."""
        import torch.distributed as dist

        for buffer in self.buffers:
            if self.group is not None:
                dist.all_reduce(buffer, group=self.group)
            buffer.div_(self.divide_by)


class Buckets(FlatGradients):
    """In DDP's place among ranks that are not there, with its memory: gradients of all but the last micro-step lie
    beside the buckets, and the last one moves each into its own."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], group: ProcessGroup | None, divide_by: int, micro_steps: int
    ) -> None:
        self._micro_steps = micro_steps
        self._seen: dict[nn.Parameter, int] = {}
        super().__init__(parameters, group, divide_by)
        for parameter in self._views:
            parameter.register_post_accumulate_grad_hook(self._move)

    def clear(self) -> None:
        self._seen = dict.fromkeys(self._views, 0)

    def _move(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter) and parameter.grad is not None
        self._seen[parameter] += 1
        if self._seen[parameter] == self._micro_steps:
            parameter.grad = self._views[parameter].copy_(parameter.grad)
