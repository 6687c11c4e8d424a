"""A command of its own for tests that kill commands: `python drive.py OUT NUM_RUNS NUM_STEPS STEP_S`."""

from __future__ import annotations

import sys
from pathlib import Path


def main(out: str, num_runs: str, num_steps: str, step_s: str) -> int:
    """Execute so many runs side by side in pairs; the outcome's exit status."""
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[3])]
    from conftest import make_plan, make_run

    from suite.execute import execute
    from suite.execute.progress import show_progress

    runs = [make_run(seed, int(num_steps), step_s=float(step_s)) for seed in range(int(num_runs))]
    with show_progress() as tell:
        return execute(make_plan(*runs), Path(out), jobs=2, worker="fake_worker", on_event=tell).exit_code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
