"""Running real code on tensors that have shapes and no data, in a group of ranks that are not there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode


class _Unread(TorchDispatchMode):
    """Answers for tensors without data where a program reads a number out of one or lets DTensor communicate.

    A float reads 0 and anything else 1: a loss is finite, no gradient overflowed, conditions hold, a pipeline's stages
    agree on their shapes; so the step takes the road of one in the midst of training. DTensor's collectives, which end
    in PyTorch's rule for their shapes, are noted with the others.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented
        if func is torch.ops.aten._local_scalar_dense.default:
            return 0.0 if args[0].dtype.is_floating_point else 1
        if func is torch.ops._c10d_functional.wait_tensor.default:
            return args[0]  # as it does; PyTorch's rule for shapes makes a second tensor
        if func.namespace == "fsdp" and func._schema.name == "fsdp::chunk_cat":
            return None  # it fills a buffer, from as many pieces as there are ranks
        result = func(*args, **(kwargs or {}))
        if func.namespace == "_c10d_functional":
            _note(func, args, result)
        return result


_PAYLOADS = {
    "all_reduce": ("all_reduce", "input"),
    "all_reduce_": ("all_reduce", "input"),
    "all_reduce_coalesced": ("all_reduce", "input"),
    "all_gather_into_tensor": ("all_gather", "output"),
    "all_gather_into_tensor_coalesced": ("all_gather", "output"),
    "reduce_scatter_tensor": ("reduce_scatter", "input"),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", "input"),
    "all_to_all_single": ("all_to_all", "input"),
    "broadcast": ("broadcast", "input"),
}
"""Functional collective -> its name in the records, and what its payload is."""


def _note(func: Any, args: Any, result: Any) -> None:
    import torch.distributed as dist

    from harness.parallel import recorder

    name = func._schema.name.partition("::")[2]
    if name in _PAYLOADS:
        op, which = _PAYLOADS[name]
        group = next(
            value for value in reversed(args) if isinstance(value, str)
        )  # the last text is the group's name
        resolve: Any = getattr(dist.distributed_c10d, "_resolve_process_group")  # noqa: B009 - not exported
        recorder.note(op, args[0] if which == "input" else result, resolve(group))
    else:
        raise NotImplementedError(f"a trace does not know the collective {name}")


class _Chunks(Sequence[Tensor]):
    """torch.chunk, each part made when it is asked for. FSDP2 cuts a parameter into as many as there are ranks and
    takes its own and the first: with thousands of ranks that is most of a trace."""

    def __init__(self, tensor: Tensor, count: int, dim: int) -> None:
        self._tensor, self._count, self._dim = tensor, count, dim

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        rows = self._tensor.shape[self._dim]
        each = -(-rows // self._count)
        first = min(range(self._count)[index] * each, rows)
        return self._tensor.narrow(self._dim, first, min(each, rows - first))


@contextmanager
def without_data() -> Iterator[None]:
    """Tensors made within are fake: they lie on the CPU and take no memory."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    fsdp: Any = _fsdp_param
    plain, fsdp._chunk_with_empty = fsdp._chunk_with_empty, _Chunks
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), _Unread():
            yield
    finally:
        fsdp._chunk_with_empty = plain


@contextmanager
def group_of(num_ranks: int, rank: int) -> Iterator[None]:
    """This process as one of `num_ranks`; collectives end at once and move nothing."""
    if num_ranks == 1:
        yield
        return
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from harness.parallel import recorder

    recorder.register("cpu")
    dist.init_process_group(recorder.FAKE_BACKEND, rank=rank, world_size=num_ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


class Blank:
    """Batches without data, as TokenBatches gives them. Made before the step, they are no part of its memory."""

    def __init__(self, batch_size: int, seq_len: int) -> None:
        self._tokens = torch.zeros(batch_size, seq_len, dtype=torch.long)
        self._targets = torch.zeros(batch_size, seq_len, dtype=torch.long)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        return self._tokens, self._targets
