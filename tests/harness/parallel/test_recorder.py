"""The recording process group: what it notes of each kind of call, and that it changes none."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from harness.ledger.step import Collective
from harness.parallel import recorded, recorder
from harness.parallel.flight import FlightWriter, read_flight
from harness.spec import ParallelismSpec
from tests.harness.parallel.conftest import run_ranks

KB = torch.ones(256)
"""1024 bytes of FP32."""


def noted(function: Callable[[], Any]) -> list[tuple[str, int, str, tuple[int, ...], bool, bool]]:
    with recorder.recording() as calls:
        function()
    return [(c.op, c.num_bytes, c.dtype, c.group, c.control, c.ended is not None) for c in calls]


def every_call() -> dict[str, Any]:
    """Each way that PyTorch has of communicating, one after the other."""
    from torch.distributed import _functional_collectives as functional
    from torch.distributed.distributed_c10d import _coalescing_manager

    rank, peer = dist.get_rank(), 1 - dist.get_rank()
    two, half = torch.empty(512), torch.empty(128)

    def exchange() -> None:
        work = dist.isend(KB, peer), dist.irecv(torch.empty(256), peer)
        for each in work:
            each.wait()

    def batched() -> None:
        pairs = [dist.P2POp(dist.isend, KB, peer), dist.P2POp(dist.irecv, torch.empty(256), peer)]
        for each in dist.batch_isend_irecv(pairs):
            each.wait()

    def coalesced(kind: str) -> None:
        with _coalescing_manager():
            for _ in range(2):
                if kind == "all_reduce":
                    dist.all_reduce(KB.clone())
                elif kind == "all_gather":
                    dist.all_gather_into_tensor(torch.empty(512), KB)
                else:
                    dist.reduce_scatter_tensor(torch.empty(128), KB)

    def functionally(name: str, *args: Any) -> Callable[[], Any]:
        return lambda: functional.wait_tensor(getattr(functional, name)(*args))

    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(KB.clone()),
        "asynchronous": lambda: dist.all_reduce(KB.clone(), async_op=True).wait(),  # type: ignore[union-attr]
        "broadcast": lambda: dist.broadcast(KB.clone(), 0),
        "reduce": lambda: dist.reduce(KB.clone(), 0),
        "list gather": lambda: dist.all_gather([torch.empty(256), torch.empty(256)], KB),
        "gather": lambda: dist.all_gather_into_tensor(two, KB),
        "list scatter": lambda: dist.reduce_scatter(half, [half.clone(), half.clone()]),
        "scatter": lambda: dist.reduce_scatter_tensor(half, KB),
        "all to all": lambda: dist.all_to_all_single(torch.empty(256), KB),
        "uneven": lambda: dist.all_to_all_single(
            torch.empty(4 * (rank + 1)), torch.ones(6), [2 * (rank + 1)] * 2, [2, 4]
        ),
        "list all to all": lambda: dist.all_to_all([half, half.clone()], [half.clone(), half.clone()]),
        "point to point": exchange,
        "batched": batched,
        "barrier": dist.barrier,
        "functional all_reduce": functionally("all_reduce", KB, "sum", dist.group.WORLD),
        "functional gather": functionally("all_gather_tensor", KB, 0, dist.group.WORLD),
        "functional scatter": functionally("reduce_scatter_tensor", KB, "sum", 0, dist.group.WORLD),
        "coalesced all_reduce": lambda: coalesced("all_reduce"),
        "coalesced gather": lambda: coalesced("all_gather"),
        "coalesced scatter": lambda: coalesced("reduce_scatter"),
    }
    return {name: noted(call) for name, call in calls.items()}


def test_every_call_is_seen_once_with_its_payload() -> None:
    def one(op: str, num_bytes: int) -> list[Any]:
        return [(op, num_bytes, "float32", (0, 1), False, True)]

    wanted = {
        "all_reduce": one("all_reduce", 1024),
        "asynchronous": one("all_reduce", 1024),
        "broadcast": one("broadcast", 1024),
        "reduce": one("reduce", 1024),
        "list gather": one("all_gather", 2048),
        "gather": one("all_gather", 2048),
        "list scatter": one("reduce_scatter", 1024),
        "scatter": one("reduce_scatter", 1024),
        "all to all": one("all_to_all", 1024),
        "uneven": one("all_to_all", 24),
        "list all to all": one("all_to_all", 1024),
        "point to point": one("send", 1024) + one("recv", 1024),
        "batched": one("send", 1024) + one("recv", 1024),
        "barrier": [("barrier", 0, "", (0, 1), False, True)],
        "functional all_reduce": one("all_reduce", 1024),
        "functional gather": one("all_gather", 2048),
        "functional scatter": one("reduce_scatter", 1024),
        "coalesced all_reduce": one("all_reduce", 2048),
        "coalesced gather": one("all_gather", 4096),
        "coalesced scatter": one("reduce_scatter", 2048),
    }
    for found in run_ranks(2, every_call):
        assert found == wanted


def test_the_names_that_pytorch_calls_are_there() -> None:
    """2.13 renamed the methods that C++ calls; whatever this PyTorch has, the recorder overrides."""
    own = {name for name in vars(recorded.RecordingGroup) if not name.startswith("__")}
    inherited = {name for name in recorded.METHODS if hasattr(dist.ProcessGroup, name)}
    assert inherited <= own
    assert {"allreduce", "broadcast", "send", "recv", "alltoall"} <= inherited
    assert inherited & {"all_gather_single", "_allgather_base"}
    assert inherited & {"reduce_scatter_single", "_reduce_scatter_base"}
    assert inherited & {"all_to_all_single", "alltoall_base"}


def subgroups() -> list[Any]:
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = pairs[dist.get_rank() % 2]
    found = noted(lambda: dist.all_reduce(KB.clone(), group=mine))
    with recorder.control():
        found += noted(lambda: dist.all_reduce(KB.clone()))
    with recorder.paused():
        found += noted(lambda: dist.all_reduce(KB.clone()))
    return found


def test_groups_control_and_pauses() -> None:
    found = run_ranks(4, subgroups)
    assert found[1] == [
        ("all_reduce", 1024, "float32", (1, 3), False, True),
        ("all_reduce", 1024, "float32", (0, 1, 2, 3), True, True),
    ]


def skipped() -> list[float]:
    """Rank 0 leaves out one sum and so takes the next one for it."""
    first, second = torch.ones(1), torch.full((1,), 10.0)
    if dist.get_rank() == 0:
        recorder.skip_next()
    dist.all_reduce(first)
    if dist.get_rank() == 0:
        dist.all_reduce(second)
    return [float(first), float(second)]


def test_a_skipped_collective_returns_at_once() -> None:
    assert run_ranks(2, skipped) == [[1.0, 11.0], [11.0, 10.0]]


def with_flight(folder: str) -> int:
    path = Path(folder) / f"rank{dist.get_rank()}.flight"
    recorder.write_to(FlightWriter(path, dist.get_rank(), 2))
    dist.all_reduce(KB.clone())
    dist.barrier()
    recorder.write_to(None)
    dist.all_reduce(KB.clone())
    return len(read_flight(path).records)


def test_calls_are_written_to_the_flight_file(tmp_path: Path) -> None:
    assert run_ranks(2, with_flight, str(tmp_path)) == [2, 2]
    (first, barrier) = read_flight(tmp_path / "rank1.flight").records
    assert (first.op, first.num_bytes, first.dtype, first.group) == ("all_reduce", 1024, "float32", (0, 1))
    assert first.ended is not None
    assert barrier.op == "barrier"


def ddp_steps() -> list[int]:
    from harness.parallel import replicate

    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    counts = []
    with recorder.recording() as calls:
        wrapped = replicate.ddp(net, dist.group.WORLD)  # type: ignore[arg-type]
    counts.append(len(calls))
    for step in range(3):
        with recorder.recording() as calls:
            wrapped(torch.ones(2, 8)).sum().backward()
            net.zero_grad()
            if step == 0:
                replicate.settle(wrapped)
        counts.append(sum(call.num_bytes for call in calls))
    return counts


def test_what_ddp_says_once_belongs_to_no_step() -> None:
    assert run_ranks(2, ddp_steps)[0] == [0, 576, 576, 576]


def test_calls_are_summed_up_by_axis() -> None:
    mesh = ParallelismSpec(dp=2, cp=2, tp=2)

    def call(op: str, num_bytes: int, group: tuple[int, ...], control: bool = False) -> recorder.Call:
        return recorder.Call(op, num_bytes, "float32", group, control, 1.0, 1.5)

    calls = [
        call("all_reduce", 10, (0, 1)),
        call("all_reduce", 20, (0, 1)),
        call("all_gather", 5, (0, 2, 4, 6)),
        call("barrier", 0, tuple(range(8))),
        call("all_reduce", 8, tuple(range(8)), control=True),
    ]
    assert recorder.collectives(calls, mesh) == (
        Collective("control", "all_reduce", 1, 8, 8),
        Collective("dp+cp", "all_gather", 1, 5, 4),
        Collective("tp", "all_reduce", 2, 30, 2),
    )
    assert recorder.seconds(calls, mesh)["tp.all_reduce"] == pytest.approx(1.0)


def waits_in_vain() -> str:
    """What becomes of an all-reduce of a mesh axis that the other rank never comes to."""
    recorder.register("cpu", timedelta(seconds=1))
    group = dist.new_group([0, 1])
    if dist.get_rank() == 1:
        dist.barrier()  # until the first rank has given up
        return ""
    try:
        dist.all_reduce(torch.ones(1), group=group)
    except RuntimeError as error:
        dist.barrier()
        return str(error)
    return "it came back"


def test_the_time_limit_is_every_group_s() -> None:
    (found, _) = run_ranks(2, waits_in_vain)
    assert "imed out" in found, found
