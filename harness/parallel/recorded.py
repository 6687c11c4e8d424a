"""The process group that notes each call and hands it to the real one; harness.parallel.recorder says what for.

PyTorch's every road to a collective ends in a `ProcessGroup`'s virtual methods. Torch 2.13 renamed some of them; those
of both names are overridden where they exist.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from harness.parallel.recorder import BACKEND, FAKE_BACKEND, Call, leaves, size, state


class _PointToPoint(dist.Work):
    """A gloo send or receive has no future, so its end is when it is waited for."""

    def __init__(self, work: dist.Work, done: Callable[[], None], tensors: Any = None) -> None:
        """`tensors` live as long as this, as those of gloo's own work do."""
        super().__init__()
        self._work, self._done, self._tensors = work, done, tensors

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        result: bool = self._work.wait(timeout) if timeout else self._work.wait()
        self._done()
        return result

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def is_success(self) -> bool:
        return bool(self._work.is_success())

    def exception(self) -> Any:
        return self._work.exception()

    def synchronize(self) -> None:
        self._work.synchronize()

    def block_current_stream(self) -> None:
        self._work.block_current_stream()

    def get_future(self) -> Any:
        return self._work.get_future()

    def result(self) -> Any:
        return self._work.result()


class _LeftOut(dist.Work):
    """The work of a collective that was skipped: done at once, with the tensors as they were."""

    def __init__(self, tensors: Any) -> None:
        super().__init__()
        self._tensors = tensors

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> Any:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(list(leaves(self._tensors)))
        return future


METHODS: dict[str, tuple[str, int]] = {
    "allreduce": ("all_reduce", 0),
    "allreduce_coalesced": ("all_reduce", 0),
    "broadcast": ("broadcast", 0),
    "reduce": ("reduce", 0),
    "allgather": ("all_gather", 0),
    "allgather_coalesced": ("all_gather", 0),
    "all_gather_single": ("all_gather", 0),
    "_allgather_base": ("all_gather", 0),
    "all_gather_single_coalesced": ("all_gather", 0),
    "allgather_into_tensor_coalesced": ("all_gather", 0),
    "gather": ("gather", 0),
    "scatter": ("scatter", 1),
    "reduce_scatter": ("reduce_scatter", 1),
    "reduce_scatter_single": ("reduce_scatter", 1),
    "_reduce_scatter_base": ("reduce_scatter", 1),
    "reduce_scatter_single_coalesced": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 1),
    "alltoall": ("all_to_all", 1),
    "all_to_all_single": ("all_to_all", 1),
    "alltoall_base": ("all_to_all", 1),
    "send": ("send", 0),
    "recv": ("recv", 0),
    "recv_anysource": ("recv", 0),
}
"""Method of ProcessGroup -> the operation, and which argument is its payload."""


class RecordingGroup(dist.ProcessGroup):
    """A process group over `inner` that notes every call."""

    def __init__(self, inner: dist.ProcessGroup, rank: int, ranks: Sequence[int]) -> None:
        super().__init__(rank, len(ranks))  # type: ignore[call-arg]
        self.inner = inner
        self.ranks = tuple(ranks)
        self.is_fake = False

    @property
    def group_name(self) -> str:  # type: ignore[override]
        name: str = dist.distributed_c10d._world.pg_names[self]
        return name

    pg_name = group_name

    def getBackendName(self) -> str:  # noqa: N802 - the name that PyTorch calls
        return BACKEND

    def barrier(self, *args: Any, **kwargs: Any) -> Any:
        return self._call("barrier", (), self.inner.barrier, args, kwargs)

    def _call(
        self, op: str, payload: Any, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if state.skip_next:
            state.skip_next = False
            return _LeftOut(payload)
        for watcher in state.watchers:
            watcher((args, kwargs))
        num_bytes, dtype = size(payload)
        call = Call(op, num_bytes, dtype, self.ranks, state.control > 0, time.perf_counter())
        if not state.paused:
            for listener in state.listeners:
                listener.append(call)
        flight = state.flight
        number = flight.begin(op, num_bytes, dtype, self.ranks) if flight is not None else 0

        def done(_future: Any = None) -> None:
            if call.ended is None:
                call.ended = time.perf_counter()
                if flight is not None:
                    flight.end(number)

        work = method(*args, **kwargs)
        if work is None:  # NCCL inside a coalescing block
            return work
        if self.is_fake and op in ("send", "recv"):
            return _PointToPoint(work, done, payload)
        try:
            work.get_future().add_done_callback(done)
        except RuntimeError:  # gloo: "Work::getFuture not implemented."
            return _PointToPoint(work, done)
        return work


def _define(name: str, op: str, index: int) -> None:
    def method(self: RecordingGroup, *args: Any, **kwargs: Any) -> Any:
        return self._call(op, args[index], getattr(self.inner, name), args, kwargs)

    setattr(RecordingGroup, name, method)


for _name, (_op, _index) in METHODS.items():
    if hasattr(dist.ProcessGroup, _name):
        _define(_name, _op, _index)


def register(device: str) -> None:
    """Make both backends known to torch.distributed for this process, once."""
    if BACKEND in dist.Backend.backend_list:
        return
    dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])
    dist.Backend.register_backend(FAKE_BACKEND, _create_fake, extended_api=True, devices=["cpu", "cuda"])
    if device == "cuda":
        state.on_cuda = True
        _batch_point_to_point()


def _create(options: Any, _group_options: Any = None) -> RecordingGroup:
    rank, ranks = options.group_rank, options.group_size
    kinds = dist.ProcessGroup.BackendType
    inner = dist.ProcessGroup(options.store, rank, ranks)
    timeout = state.timeout or options.timeout
    backends: list[tuple[str, Any, Any]] = [
        ("cpu", kinds.GLOO, dist.ProcessGroupGloo(options.store, rank, ranks, timeout=timeout))
    ]
    if state.on_cuda:
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = timeout
        store = torch._C._distributed_c10d.PrefixStore("cuda/", options.store)
        backends.append(("cuda", kinds.NCCL, dist.ProcessGroupNCCL(store, rank, ranks, nccl)))
    group = RecordingGroup(inner, rank, list(options.global_ranks_in_group) or list(range(ranks)))
    for owner in (inner, group):  # the outer one only answers what its devices can do
        for device, kind, backend in backends:
            owner._register_backend(torch.device(device), kind, backend)
    inner._set_default_backend(backends[-1][1])
    inner._set_group_name(f"recorded_{id(inner)}")  # type: ignore[arg-type]
    return group


def _create_fake(options: Any, _group_options: Any = None) -> RecordingGroup:
    from torch._C._distributed_c10d import FakeProcessGroup

    rank, ranks = options.group_rank, options.group_size
    kind = dist.ProcessGroup.BackendType.CUSTOM
    inner = dist.ProcessGroup(options.store, rank, ranks)
    group = RecordingGroup(inner, rank, list(options.global_ranks_in_group) or list(range(ranks)))
    backend = FakeProcessGroup._create_internal(rank, ranks)
    for owner in (inner, group):
        owner._register_backend(torch.device("cpu"), kind, backend)
    inner._set_default_backend(kind)
    inner._set_group_name(f"recorded_{id(inner)}")  # type: ignore[arg-type]
    group.is_fake = True
    return group


def _batch_point_to_point() -> None:
    """NCCL needs neighbours' sends and receives in one block, or they wait for each other; PyTorch opens one for its
    own groups alone."""
    plain = dist.batch_isend_irecv

    def batched(operations: list[Any]) -> list[Any]:
        group = operations[0].group or dist.group.WORLD
        device = operations[0].tensor.device
        if not isinstance(group, RecordingGroup) or device.type != "cuda":
            return plain(operations)
        with dist.distributed_c10d._coalescing_manager(group, device, async_ops=True) as manager:
            for each in operations:
                peer = {"group_dst" if each.op is dist.isend else "group_src": each.group_peer}
                each.op(each.tensor, group=each.group, tag=each.tag, **peer)
        works: list[Any] = manager.works
        return works

    dist.batch_isend_irecv = batched  # type: ignore[assignment]
