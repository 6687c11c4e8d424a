"""A step of a run, followed: the mode, and what it should know of the run's parts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from harness.parallel import recorder
from harness.parallel.strategy import Strategy
from harness.trace.live import Live

TRIES = 3
"""Steps that a measurement follows to keep the one with the smallest peak: a thread of gloo lets go of a finished
collective's tensors when it is next scheduled, so that now and then one more is alive than the step needs."""


@contextmanager
def follow(laid_out: Strategy, optimizer: torch.optim.Optimizer, device: torch.device) -> Iterator[Live]:
    """Everything that happens within, on one rank's device."""
    buffers = [buffer for flat in laid_out.flat for buffer in flat.buffers]
    live = Live(laid_out.parts, [optimizer], device, buffers)
    with recorder.watching(live.touched), live:
        yield live
