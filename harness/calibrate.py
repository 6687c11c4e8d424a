"""How fast this machine trains, from a few real steps: what `suite plan` goes by before anything ran.

Reads {"specs": [RunSpec, ...], "dtypes": ["bf16", ...]} and writes {"runs": [...], "gemm_flops_per_s":
{...}}:

    python -m harness.calibrate < request.json

Each spec is run as it stands by the worker's own code, in this process and in a scratch folder; keep them
to a few steps. `dtypes` are those of matrix products to time, for models that are too large to try.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import worker  # sets the threading variables, so it comes before torch

import torch  # isort: skip

from harness.run import COMPUTE_DTYPES
from harness.spec import RunSpec
from results.journal import read_journal

GEMM_SIZE = 1024
GEMM_S = 0.2


def time_run(spec: RunSpec, scratch: Path) -> dict[str, Any]:
    """Run `spec`: {"step_s": median of all steps but the first, "setup_s": before the first} or {"error"}."""
    spec = spec.model_copy(update={"probes": {**spec.probes, "throughput": 1}})
    run_dir = scratch / "journals" / spec.key / "1"
    run_dir.mkdir(parents=True, exist_ok=True)
    request = {"run_id": f"{spec.key}.1", "spec": spec.model_dump(mode="json"), "start_checkpoint": None}
    (run_dir / "run.json").write_text(json.dumps(request))
    worker.run(run_dir)
    records = read_journal(run_dir / "rank0.journal").records
    measured = [record["v"] for record in records if record["k"] == "m"]
    steps = [values["step_ms"] for values in measured if "step_ms" in values]
    setup = [values["setup_seconds"] for values in measured if "setup_seconds" in values]
    if len(steps) < 2 or not setup:
        ends = [record["reason"] for record in records if record["k"] == "end"]
        return {"error": ends[-1] if ends else "recorded no step times"}
    return {"step_s": statistics.median(steps[1:]) / 1000, "setup_s": setup[0]}


def gemm_flops_per_s(dtype: torch.dtype, device: str = "cpu") -> float:
    """FLOP/s of square matrix products on one thread (or one GPU), the best of a fifth of a second's."""
    a = torch.randn(GEMM_SIZE, GEMM_SIZE, device=device).to(dtype)
    best, started = float("inf"), time.perf_counter()
    (a @ a).sum().item()
    while time.perf_counter() - started < GEMM_S or best == float("inf"):
        before = time.perf_counter()
        (a @ a).flatten()[0].item()  # reading one element waits for the product
        best = min(best, time.perf_counter() - before)
    return 2 * GEMM_SIZE**3 / best


def main() -> int:
    """Answer the request on stdin."""
    request = json.load(sys.stdin)
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory(prefix="suite-calibrate-") as scratch:
        runs = [time_run(RunSpec.model_validate(spec), Path(scratch)) for spec in request["specs"]]
    rates = {name: gemm_flops_per_s(COMPUTE_DTYPES[name], device) for name in request["dtypes"]}
    json.dump({"runs": runs, "gemm_flops_per_s": rates}, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
