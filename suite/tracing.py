"""Asking a worker to trace a training step: the real model on tensors without data, on one rank of each pipeline stage.

Seconds for 7B, minutes for 405B. An answer is kept and given again while neither the question, nor the code, nor torch
changes (harness.trace.stored). Attention is traced in the dtype that the run's device computes it in; kernels' own
workspaces are in no trace.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from harness.launch.base import LaunchError, python_command, worker_environment
from harness.ledger.step import RankStep
from harness.spec import RunSpec
from harness.trace.stored import from_json, key, known_or_made

TIMEOUT_S = 1800.0
MOST_UNASKED = 3
"""Kinds of run that a plan traces without being asked."""
FEW_LAYERS = 16
"""Layers times micro-steps of a step that is traced in seconds."""


def trace(spec: RunSpec, folder: Path | None = None, timeout_s: float = TIMEOUT_S) -> tuple[RankStep, ...]:
    """The step of one rank of each kind. Answers are kept in `folder`, else in the suite's cache. Raises
    LaunchError."""
    kept = () if folder is None else ("--cache", str(folder))
    try:
        done = subprocess.run(
            [*python_command("harness.trace"), *kept, "-"],
            input=question(spec).model_dump_json(),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env=worker_environment(),
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise LaunchError(f"the trace did not end within {timeout_s:.0f} s") from None
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise LaunchError(f"the trace failed: {said[-1]}")
    return tuple(from_json(json.loads(done.stdout)))


def question(spec: RunSpec) -> RunSpec:
    """The step of a run as the tracer takes it."""
    return spec.model_copy(update={"task": "trace", "start_from": None})


def traced_peaks(
    specs: Sequence[RunSpec | None],
    folder: Path,
    asked: bool | None,
    small: Callable[[RunSpec], bool],
    say: Callable[[str], None],
) -> list[int | None]:
    """The traced peak of each run's largest rank; None for what is no run with a model (None) and what was not traced.

    asked: trace all (True) or give only what `folder` knows (False); None: trace what is `small`, if that is quick.
    """
    known: dict[str, int | None] = {}
    wanted: dict[str, RunSpec] = {}
    keys = [None if spec is None else key(question(spec)) for spec in specs]
    for name, spec in zip(keys, specs, strict=True):
        if name is not None and spec is not None and name not in known:
            known[name] = _kept(spec, folder)
            if known[name] is None:
                wanted[name] = spec
    if asked is None:
        quick = {name: spec for name, spec in wanted.items() if small(spec)}
        if len(quick) > MOST_UNASKED:
            quick = {}
        if left := len(wanted) - len(quick):
            say(f"{left} kind{'s' if left > 1 else ''} of run not traced; `suite plan --trace` does it")
        wanted = quick
    if asked is not False:
        known |= _trace_all(wanted, folder, say)
    return [None if name is None else known[name] for name in keys]


def _kept(spec: RunSpec, folder: Path) -> int | None:
    def make() -> Sequence[RankStep]:
        raise LookupError

    try:
        return max(each.total for each in known_or_made(question(spec), folder, make))
    except LookupError:
        return None


def _trace_all(wanted: dict[str, RunSpec], folder: Path, say: Callable[[str], None]) -> dict[str, int]:
    found = {}
    for number, (name, spec) in enumerate(wanted.items(), 1):
        say(
            f"tracing a step, {number} of {len(wanted)} ({spec.model.name}, {spec.parallelism.num_ranks} ranks)"
        )
        try:
            found[name] = max(each.total for each in trace(spec, folder))
        except LaunchError as error:
            say(str(error))
    return found
