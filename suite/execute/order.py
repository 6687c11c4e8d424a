"""In what order runs start: what others wait for first, then the longest."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.spec import RunSpec
    from suite.declare import PlannedRun


def relative_cost(spec: RunSpec) -> float:
    """A number that grows with a run's duration; for ordering alone.

    Six FLOPs a weight a token, three times that where casts are emulated (measured: 2 to 3 times on CPU). A study
    counts as nothing: it takes seconds, and goes last.
    """
    if not spec.is_training:
        return 0.0
    model = spec.model
    num_weights = model.num_layers * model.d_model * (4 * model.d_model + 3 * model.d_ffn)
    return 6.0 * num_weights * spec.tokens * (3.0 if spec.precision.recipe is not None else 1.0)


def priorities(runs: Iterable[PlannedRun]) -> dict[str, float]:
    """Key -> cost of the run and of the longest chain of runs that wait for it."""
    runs = list(runs)
    cost = {run.key: relative_cost(run.spec) for run in runs}
    behind = dict.fromkeys(cost, 0.0)
    # Bases come before their dependants in a plan, so backwards each chain is complete when it is reached.
    for run in reversed(runs):
        if run.depends_on is not None:
            behind[run.depends_on] = max(behind[run.depends_on], cost[run.key] + behind[run.key])
    return {key: cost[key] + behind[key] for key in cost}
