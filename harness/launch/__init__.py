"""Start the processes of runs, watch for their ends, and leave no orphan.

Two launchers with one face (`base.Launcher`): `spawn` starts a fresh interpreter for each run, `fork` forks
one from a process that has already imported torch. `choose.open_launcher` picks between them and says why.
Nothing here imports torch except the zygote process itself.
"""

from harness.launch.base import Exit, Launcher, LaunchError, Request
from harness.launch.choose import choose_mode, open_launcher

__all__ = ["Exit", "LaunchError", "Launcher", "Request", "choose_mode", "open_launcher"]
