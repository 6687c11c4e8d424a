"""Faults put in on purpose, so that every status of a run can be produced, tested and shown.

Each strikes one rank. `skip-collective` is not here: harness.parallel.group.at_step prepares it before the step begins.
"""

from __future__ import annotations

import os
import signal
import time

import torch

from harness.parallel.group import this_rank
from harness.spec import FaultSpec

SLOW_STEP_S = 0.5
GREED_BYTES = 1 << 31


def strike(fault: FaultSpec | None, step: int, loss: torch.Tensor) -> None:
    """Do what `fault` says if this is its step (from its step on for `slow`) and its rank."""
    if fault is None or step < fault.step or fault.rank != this_rank():
        return
    if fault.kind == "slow":
        time.sleep(SLOW_STEP_S)
    elif step > fault.step:
        return
    elif fault.kind == "nan":
        loss.detach().fill_(float("nan"))
    elif fault.kind == "hang":
        while True:
            time.sleep(3600)
    elif fault.kind == "oom":
        kept = []
        while True:  # touches its memory, so that a limit or the machine's end must stop it
            kept.append(torch.ones(GREED_BYTES // 4))
    elif fault.kind == "crash":
        os.abort()
    elif fault.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
