"""A run of several ranks: its process becomes the agent that starts them, sees the first of them die and ends the rest.

The agent is `torch.distributed.launcher.api.elastic_launch`, what torchrun is the command line of. On CPU it forks
the ranks, which have torch then; a CUDA context does not survive a fork, so there they are fresh interpreters. Agent
and ranks stay in the run's session and process group, and each rank is tied to the agent's life: whoever ends the run
ends them all.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import signal
import sys
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from harness.launch.base import EXIT_RANK_KILLED, EXIT_STATUS
from harness.launch.child import die_with_parent, lift_memory_limit
from harness.launch.culprit import Ended, explain_group
from harness.spec import RunSpec
from results.journal import JournalWriter

MONITOR_S = 0.05
"""How often the agent looks for dead ranks."""

_HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def preload() -> None:
    """Import what an agent needs, before a zygote forks it."""
    importlib.import_module("torch.distributed.launcher.api")
    # The rendezvous backends are looked up among the installed packages' entry points: a tenth of a second.
    importlib.import_module("torch.distributed.elastic.rendezvous.registry")


def is_rank(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process was started as one rank of a group, by the agent below or by torchrun."""
    return "RANK" in environment and "WORLD_SIZE" in environment


def run_group(run_dir: Path, spec: RunSpec, worker: str) -> int:
    """Run every rank of `spec` to its end; returns the exit status of the run.

    When it fails, the outcome of the whole group is the last end record in rank 0's journal.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    lift_memory_limit()  # it is for each rank to accept
    for name in ("torch.distributed.elastic", "torch.distributed.launcher", "torch.multiprocessing"):
        # They tell at length, with a traceback, that a rank ended; the journal says how.
        logging.getLogger(name).setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    try:
        # The launcher makes a folder of each rank's own and leaves it behind.
        with TemporaryDirectory(prefix="elastic-", dir=run_dir, ignore_cleanup_errors=True) as folder:
            config = LaunchConfig(
                min_nodes=1,
                max_nodes=1,
                nproc_per_node=spec.num_ranks,
                run_id=json.loads((run_dir / "run.json").read_text())["key"],
                rdzv_backend="c10d",
                rdzv_endpoint="127.0.0.1:0",
                rdzv_configs={"is_host": True},
                local_addr="127.0.0.1",
                max_restarts=0,
                monitor_interval=MONITOR_S,
                start_method="fork" if spec.device == "cpu" and sys.platform == "linux" else "spawn",
                logs_specs=DefaultLogsSpecs(log_dir=folder),
            )
            elastic_launch(config, _begin_rank)(str(run_dir), os.getpid(), worker)
    except ChildFailedError as error:
        ends = [Ended(rank, failure.exitcode) for rank, failure in error.failures.items()]
        outcome = explain_group(run_dir, ends, spec.limits.hang_s)
    except SignalException as error:
        # The ranks are gone; now die of it too, so that the exit status tells that somebody asked for it.
        signal.signal(error.sigval, signal.SIG_DFL)
        os.kill(os.getpid(), error.sigval)
        raise
    else:
        return EXIT_STATUS["ok"]
    journal = JournalWriter(run_dir / "rank0.journal")
    journal.end(outcome.status, outcome.reason)
    journal.close()
    return EXIT_RANK_KILLED if outcome.from_outside else EXIT_STATUS[outcome.status]


def _begin_rank(run_dir: str, agent: int, worker: str) -> None:
    """Entry of a rank: take back the handlers of the agent, die with it, run."""
    for number in _HANDLED:
        # A handler in Python never runs while the rank waits in a collective.
        signal.signal(number, signal.SIG_DFL)
    die_with_parent(agent)
    code = int(importlib.import_module(worker).run(Path(run_dir)))
    if code != 0:
        leave(code)


def leave(code: int) -> None:
    """End this process now: after a failure, tidying up waits for peers that will not answer."""
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
