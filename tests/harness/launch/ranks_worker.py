"""The real worker with a stand-in for its task: so many steps of all-reduces, and the faults of the spec.

As the zygote's worker it is imported before the ranks are forked, which therefore know the stand-in too. Labels of
run.json: `sizes`, elements of each all-reduce of a step; `step_s`, seconds a step.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from harness import worker
from harness.parallel.group import at_step, this_rank
from harness.registry import TASKS
from harness.run import Diverged
from harness.spec import RunSpec
from harness.tasks.faults import strike
from results.journal import JournalWriter


def loop(spec: RunSpec, request: dict[str, Any], journal: JournalWriter, checkpoints: Path) -> list[Path]:
    """Steps of all-reduces whose sums are checked by the loss."""
    labels = request["labels"]
    for step in range(1, spec.num_steps + 1):
        at_step(step, spec.fault)
        loss = torch.tensor(float(this_rank() + step))
        strike(spec.fault, step, loss)
        for size in labels.get("sizes", [1024, 64, 256]):
            dist.all_reduce(torch.full((size,), float(loss)))
        mean = loss.clone()
        dist.all_reduce(mean)
        mean /= spec.num_ranks
        time.sleep(labels.get("step_s", 0.0))
        if not torch.isfinite(mean):
            raise Diverged(f"the loss is {float(mean)} at step {step}", on_this_rank=not torch.isfinite(loss))
        journal.measure(step, {"loss": float(mean)})
    return []


TASKS._entries["pretrain"] = f"{__name__}:loop"

run = worker.run

if __name__ == "__main__":
    sys.exit(run(Path(sys.argv[1])))
