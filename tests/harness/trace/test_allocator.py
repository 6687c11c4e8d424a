"""The CUDA allocator's figures, on what can be had without a GPU."""

from __future__ import annotations

import torch

from harness.trace.allocator import Allocator, largest_blocks, watched


def entry(action: str, addr: int, size: int, *where: str) -> dict[str, object]:
    frames = [{"filename": name, "line": 7, "name": "forward"} for name in where]
    return {"action": action, "addr": addr, "size": size, "frames": frames}


def test_the_largest_blocks_at_the_peak() -> None:
    trace = [
        entry("alloc", 1, 100, "/torch/nn/functional.py", "/x/harness/models/ffn.py"),
        entry("alloc", 2, 50, "/torch/optim/adam.py"),
        entry("free_requested", 1, 100),
        entry("free_completed", 1, 100),
        entry("alloc", 3, 120),
        entry("alloc", 1, 10),
        entry("free_completed", 3, 120),
        entry("alloc", 4, 60),
    ]
    assert largest_blocks(trace) == (
        (120, "unknown"),
        (50, "/torch/optim/adam.py:7 forward"),
        (10, "unknown"),
    )
    assert largest_blocks(trace[:2], count=1) == ((100, "models/ffn.py:7 forward"),)


def test_blocks_from_before_the_trace_do_not_hide_the_peak() -> None:
    trace = [entry("free_completed", 9, 1000), entry("alloc", 1, 300), entry("free_completed", 1, 300)]
    assert largest_blocks(trace, before=2000) == ()  # the most was what lay there at the start
    assert largest_blocks(trace[1:], before=2000) == ((300, "unknown"),)


def test_the_residue_adds_up_to_what_the_device_gave_away() -> None:
    found = Allocator(allocated=1100, requested=1000, active=1150, reserved=1500, in_use=2100)
    residue = found.residue(tensors=900)
    assert residue == {"rounding": 100, "fragmentation": 400, "library": 600, "unknown": 100}
    assert 900 + sum(residue.values()) == found.in_use


def test_a_cpu_has_no_allocator_to_ask() -> None:
    with watched(torch.device("cpu")) as found:
        torch.ones(10)
    assert found == Allocator()
