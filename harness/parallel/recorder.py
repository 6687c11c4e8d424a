"""Sees every collective of a rank: a process group that notes each call and hands it to the real one.

    recorder.register("cpu")
    dist.init_process_group("recorded", ...)         # gloo on a CPU, NCCL (and gloo) on CUDA
    with recorder.recording() as calls:              # whatever this rank communicates meanwhile
        train_step()
    recorder.collectives(calls, spec.parallelism)    # summed up by mesh axis and kind

PyTorch's every road to a collective (DDP's C++ reducer, ZeroRedundancyOptimizer, FSDP2, DTensor, pipelining) ends in a
`ProcessGroup`'s virtual methods, so one subclass (harness.parallel.recorded) sees them all, with payload, dtype and
group. Calls are also written to the rank's flight file, which outlives the process (harness.parallel.flight).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from harness.ledger.step import CONTROL, Collective, Op
from harness.parallel.flight import FlightWriter
from harness.parallel.mesh import axis_of
from harness.spec import ParallelismSpec

if TYPE_CHECKING:
    from harness.parallel.recorded import RecordingGroup

BACKEND = "recorded"
FAKE_BACKEND = "recorded-fake"
"""The same over PyTorch's fake process group: any number of ranks, no data."""


@dataclass(slots=True)
class Call:
    """One call of this rank."""

    op: str
    """As in harness.ledger.step.Op; also barrier, reduce, gather and scatter."""
    num_bytes: int
    """Payload, by the rule of harness.ledger.step.Collective."""
    dtype: str
    group: tuple[int, ...]
    """Global ranks, in the group's order."""
    control: bool
    """Bookkeeping: it ran inside `control()`."""
    started: float
    """Seconds of time.perf_counter."""
    ended: float | None = None
    """When it was done, or for a point-to-point call when it was waited for; None: not yet. On CUDA when it was
    enqueued: durations there come from the profiler."""

    @property
    def seconds(self) -> float:
        return 0.0 if self.ended is None else self.ended - self.started


class _State:
    """What the process groups of this process share."""

    def __init__(self) -> None:
        self.listeners: list[list[Call]] = []
        self.control = 0
        self.paused = 0
        self.skip_next = False
        self.on_cuda = False
        self.timeout: timedelta | None = None
        self.flight: FlightWriter | None = None
        self.watchers: list[Callable[[Any], None]] = []


state = _State()


def leaves(payload: Any) -> Iterator[Tensor]:
    if isinstance(payload, Tensor):
        yield payload
    else:
        for each in payload:
            yield from leaves(each)


def size(payload: Any) -> tuple[int, str]:
    """Bytes of all tensors in it, and the dtype of the first."""
    tensors = list(leaves(payload))
    dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else ""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors), dtype


@contextmanager
def recording() -> Iterator[list[Call]]:
    """The calls of this rank, from any thread, while the context lasts."""
    calls: list[Call] = []
    state.listeners.append(calls)
    try:
        yield calls
    finally:
        state.listeners = [each for each in state.listeners if each is not calls]


@contextmanager
def watching(watcher: Callable[[Any], None]) -> Iterator[None]:
    """`watcher` is shown the arguments of every call, tensors and lists of tensors among them, while the context
    lasts."""
    state.watchers.append(watcher)
    try:
        yield
    finally:
        state.watchers.remove(watcher)


@contextmanager
def control() -> Iterator[None]:
    """Collectives in here serve the record (a loss averaged, a norm), not the scheme: their axis reads `control`."""
    state.control += 1
    try:
        yield
    finally:
        state.control -= 1


@contextmanager
def paused() -> Iterator[None]:
    """Collectives in here are no part of any step (DDP tells its ranks the order of its buckets, once)."""
    state.paused += 1
    try:
        yield
    finally:
        state.paused -= 1


def note(op: str, payload: Any, group: RecordingGroup) -> None:
    """Write down a call that never reaches its group: DTensor's, on tensors without data."""
    num_bytes, dtype = size(payload)
    now = time.perf_counter()
    for listener in state.listeners:
        listener.append(Call(op, num_bytes, dtype, group.ranks, state.control > 0, now, now))


def skip_next() -> None:
    """Leave out this rank's next collective: the fault that makes the others wait for ever."""
    state.skip_next = True


def write_to(flight: FlightWriter | None) -> None:
    """Also note each call in this file."""
    state.flight = flight


def collectives(calls: Iterable[Call], parallelism: ParallelismSpec) -> tuple[Collective, ...]:
    """The calls summed up by axis and operation, barriers left out."""
    return tuple(
        Collective(axis, cast("Op", op), len(same), sum(call.num_bytes for call in same), len(same[0].group))
        for (axis, op), same in _sorted(calls, parallelism).items()
    )


def seconds(calls: Iterable[Call], parallelism: ParallelismSpec) -> dict[str, float]:
    """axis.op -> seconds from call to end, added up; nothing on CUDA, where calls end before they have run."""
    return {
        f"{axis}.{op}": sum(call.seconds for call in same)
        for (axis, op), same in _sorted(calls, parallelism).items()
    }


def _sorted(calls: Iterable[Call], parallelism: ParallelismSpec) -> dict[tuple[str, str], list[Call]]:
    """(axis, operation) -> its calls, in the order of the names."""
    found: dict[tuple[str, str], list[Call]] = {}
    for call in calls:
        if call.op != "barrier":
            axis = CONTROL if call.control else axis_of(parallelism, call.group)
            found.setdefault((axis, call.op), []).append(call)
    return dict(sorted(found.items()))


def register(device: str, timeout: timedelta | None = None) -> str:
    """Make the backend known to torch.distributed for this process, once; returns its name, for init_process_group.

    `timeout` bounds a collective of every group: PyTorch hands that of the default group on to no other, and those of
    a mesh's axes would wait for half an hour.
    """
    from harness.parallel import recorded

    recorded.register(device)
    state.timeout = timeout
    return BACKEND
