"""What the pages read from the database: rows of runs, their environments, and measurements in bulk.

One query for each group of metrics and never one a run; what a section has read is dropped when it is done.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from suite.report.series import Curve

if TYPE_CHECKING:
    from results.records import RunRow
    from results.store import Store


class Points:
    """Measurements of some metrics of some runs, by metric, run and scope."""

    def __init__(self, store: Store, keys: Iterable[str], metrics: Sequence[str]) -> None:
        self._curves: dict[tuple[str, str], dict[str, list[tuple[int, float]]]] = {}
        for key, metric, scope, step, value in store.values(list(keys), list(metrics)):
            self._curves.setdefault((metric, key), {}).setdefault(scope, []).append((step, value))

    def scopes(self, metric: str, key: str) -> dict[str, list[tuple[int, float]]]:
        """Scope -> curve; empty where the run recorded nothing of the metric."""
        return self._curves.get((metric, key), {})

    def curve(self, metric: str, key: str, scope: str = "") -> Curve:
        """Steps and values of one metric of one run."""
        return self.scopes(metric, key).get(scope, [])

    def triples(self, metric: str, key: str) -> list[tuple[str, int, float]]:
        """(scope, step, value), as measures take them."""
        return [
            (scope, step, value) for scope, curve in self.scopes(metric, key).items() for step, value in curve
        ]

    def over_scopes(self, metric: str, key: str, reduce: Literal["max", "min"]) -> list[tuple[int, float]]:
        """At each step the largest or smallest of all finite scopes."""
        steps: dict[int, list[float]] = {}
        for curve in self.scopes(metric, key).values():
            for step, value in curve:
                if math.isfinite(value):
                    steps.setdefault(step, []).append(value)
        extreme = max if reduce == "max" else min
        return [(step, extreme(steps[step])) for step in sorted(steps)]

    def finite(self, metric: str, key: str, scope: str) -> list[float]:
        """All finite values of one scope."""
        return [value for _, value in self.curve(metric, key, scope) if math.isfinite(value)]


class Evidence:
    """The rows of runs and environments behind a site; measurements are read when asked for."""

    def __init__(self, store: Store, keys: Iterable[str]) -> None:
        self.store = store
        self.rows: dict[str, RunRow] = store.status_of(list(keys))
        ids = sorted({row.environment_id for row in self.rows.values() if row.environment_id})
        self.environments = {name: store.environment(name) or {} for name in ids}

    def points(self, keys: Iterable[str], *metrics: str) -> Points:
        """Measurements of those of `keys` that have a row."""
        return Points(self.store, [key for key in keys if key in self.rows], metrics)

    def status(self, key: str) -> str:
        """The run's status; `not run` where it has no row."""
        row = self.rows.get(key)
        return row.status if row else "not run"

    def environment(self, key: str) -> dict[str, Any]:
        """Columns of the environment that the run was in; empty where unknown."""
        row = self.rows.get(key)
        return self.environments.get(row.environment_id or "", {}) if row else {}

    def machines(self, keys: Iterable[str]) -> list[str]:
        """Names of the machines that the runs ran on."""
        found = {str(self.environment(key).get("machine") or "") for key in keys}
        return sorted(found - {""})
