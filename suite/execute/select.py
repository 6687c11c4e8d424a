"""`--only label=value`: the part of a plan somebody wants to run now."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from suite.declare import Plan


class SelectionError(ValueError):
    """A label or value that no run of the plan has."""


def select_runs(plan: Plan, only: Sequence[str]) -> Plan:
    """The plan with the runs that match, and the bases they stand on.

    Conditions on different labels must all hold; of several on one label, any.
    """
    if not only:
        return plan
    wanted: dict[str, set[str]] = {}
    for condition in only:
        name, sign, value = condition.partition("=")
        if not sign:
            raise SelectionError(f"--only {condition!r}: write label=value, such as precision=bf16")
        _check(plan, name, value)
        wanted.setdefault(name, set()).add(value)
    chosen = {
        run.key
        for run in plan.runs
        if all(
            name in run.labels and label_text(run.labels[name]) in values for name, values in wanted.items()
        )
    }
    for run in reversed(plan.runs):
        if run.key in chosen and run.depends_on is not None:
            chosen.add(run.depends_on)
    return replace(plan, runs=tuple(run for run in plan.runs if run.key in chosen))


def label_text(value: Any) -> str:
    """A label's value as it is written in a case file."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _check(plan: Plan, name: str, value: str) -> None:
    names = {label for run in plan.runs for label in run.labels}
    if name not in names:
        raise SelectionError(f"--only: no run has a label {name!r}{_offer(name, names)}")
    values = {label_text(run.labels[name]) for run in plan.runs if name in run.labels}
    if value not in values:
        raise SelectionError(f"--only: no run has {name}={value}{_offer(value, values)}")


def _offer(value: str, options: Iterable[str]) -> str:
    near = difflib.get_close_matches(value, list(options), n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"; there are {', '.join(sorted(options))}{hint}"
