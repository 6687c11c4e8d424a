"""A worker for tests: no torch, a loss that is a formula, and misbehaviour on request.

It obeys `labels` of run.json: `do` (ok, hang, spin, crash, raise, oom, nan, silent, segv, memory, rank-killed; the
spec's fault without it), `step_s` (seconds a step) and `at` (the step of the misdeed). It resumes like the real one.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from results.journal import JournalWriter


def loss_at(seed: int, step: int) -> float:
    return 5.0 / (1 + step) + 0.001 * seed


def run(run_dir: Path) -> int:
    request = json.loads((run_dir / "run.json").read_text())
    labels, spec = request["labels"], request["spec"]
    out = run_dir.parents[2]
    with (out / "order.txt").open("a") as log:
        log.write(f"{request['key']} {request['attempt']} {os.getpid()}\n")
    what = labels.get("do") or (spec.get("fault") or {}).get("kind", "ok")
    writer = JournalWriter(run_dir / "rank0.journal")
    writer.start({"hostname": "test"})
    first = 1
    if request["resume_checkpoint"]:
        first = (
            int((out / "checkpoints" / f"{request['resume_checkpoint']}.safetensors").read_text().split()[1])
            + 1
        )
    num_steps = -(-spec["tokens"] // (spec["batch_size"] * spec["seq_len"]))
    for step in range(first, num_steps + 1):
        if step == labels.get("at", 1):
            code = _misbehave(what, writer)
            if code is not None:
                return code
        time.sleep(labels.get("step_s", 0.0))
        writer.measure(step, {"loss": loss_at(spec["seed"], step)})
        if labels.get("step_s") or step == num_steps:
            content = f"{request['key']} {step} {run_dir.parent.name}"
            sha256 = hashlib.sha256(content.encode()).hexdigest()
            (out / "checkpoints" / f"{sha256}.safetensors").write_text(content)
            writer.checkpoint(step, sha256, final=step == num_steps)
    writer.measure(num_steps, {"peak_bytes": 3.0 * 2**20}, scope="total")
    writer.end("ok")
    writer.close()
    for rank in range(1, request.get("num_ranks", 1)):  # it is all ranks in one
        other = JournalWriter(run_dir / f"rank{rank}.journal")
        other.start({"hostname": "test"}, rank)
        other.end("ok")
        other.close()
    return 0


def _misbehave(what: str, writer: JournalWriter) -> int | None:
    if what == "hang":
        time.sleep(60)
    elif what == "spin":
        # Deaf to SIGTERM, with a child of its own: only killing the whole group ends this.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", str(os.getpgid(0))])
        while True:
            time.sleep(0.1)
            writer.beat()
    elif what == "raise":
        raise RuntimeError("this worker was told to fail")
    elif what == "crash":
        writer.end("crashed", "told to crash")
        return 1
    elif what == "rank-killed":
        writer.end("crashed", "rank 1 was killed by signal 9 at step 1")
        return 14
    elif what == "oom":
        return 10
    elif what == "nan":
        writer.end("diverged", "loss is NaN at step 1")
        return 11
    elif what == "silent":
        return 0
    elif what == "segv":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif what == "memory":
        try:
            held = bytearray(256 * 2**20)
        except MemoryError:
            writer.end("oom", "address space exhausted")
            return 10
        del held
    return None
