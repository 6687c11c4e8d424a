"""Which launcher, and why."""

from __future__ import annotations

import os
import sys

from harness.launch.base import WORKER, Launcher, LaunchError

MODES = ("fork", "spawn")
VARIABLE = "SUITE_LAUNCH"


def choose_mode(device: str) -> tuple[str, str]:
    """(mode, reason) for runs on this device; the environment variable SUITE_LAUNCH overrides it."""
    asked = os.environ.get(VARIABLE)
    if asked:
        if asked not in MODES:
            raise LaunchError(
                f"{VARIABLE}={asked!r} is not a launch mode; use {' or '.join(MODES)}, or unset it"
            )
        return asked, f"{VARIABLE} is set"
    if sys.platform != "linux":
        return "spawn", f"forking after torch is loaded is safe on Linux only, this is {sys.platform}"
    if device != "cpu":
        return "spawn", f"a {device} context does not survive a fork"
    return "fork", "one import of torch serves all runs (Linux, CPU)"


def open_launcher(mode: str, worker: str = WORKER) -> Launcher:
    """The launcher of a mode; `worker` names the module whose `run(run_dir)` trains."""
    if mode == "fork":
        from harness.launch.fork import ForkLauncher

        return ForkLauncher(worker)
    from harness.launch.spawn import SpawnLauncher

    return SpawnLauncher(worker)
