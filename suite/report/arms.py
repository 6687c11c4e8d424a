"""How a case's runs are laid out on a page: what is compared, under which conditions, and over which seeds.

The claims say which axes are compared: those whose value differs between `of` and `against`. All other axes
(ageing, size of model) are conditions, and each combination of them gets a panel of its own. Seeds are
repetitions.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from suite.report.look import Look, looks
from suite.report.words import labels_text

if TYPE_CHECKING:
    from suite.declare import Plan, PlannedRun

SEED = "seed"


@dataclass(frozen=True, eq=False)
class Arm:
    """All seeds of one point of the matrix. Arms of one layout are told apart by identity."""

    labels: tuple[tuple[str, Any], ...]
    """(axis, value) without the seed."""
    treatment: tuple[str, ...]
    """Its values along the compared axes, as text; "" where the arm does not set that axis."""
    name: str
    """Told apart from the other arms of its panel."""
    full_name: str
    panel: str
    """Its conditions, as text; "" where the case has none."""
    look: Look
    runs: tuple[PlannedRun, ...]
    baseline: Arm | None
    """The arm that this one is compared with; None for a baseline itself."""

    @property
    def by_seed(self) -> dict[int, PlannedRun]:
        return {run.spec.seed: run for run in self.runs}

    @property
    def keys(self) -> list[str]:
        return [run.key for run in self.runs]

    @property
    def trains(self) -> bool:
        """Whether its runs train; studies have no loss."""
        return any(run.spec.is_training for run in self.runs)


@dataclass(frozen=True)
class Layout:
    """The arms of a plan in panels, in the order of the matrix."""

    arms: tuple[Arm, ...]
    bases: tuple[PlannedRun, ...]
    panels: tuple[str, ...]
    seeds: tuple[int, ...]
    compared_axes: tuple[str, ...]
    condition_axes: tuple[str, ...]
    reference: Mapping[str, Any]
    """What the baseline is, per compared axis."""

    def in_panel(self, panel: str) -> list[Arm]:
        return [arm for arm in self.arms if arm.panel == panel]

    @property
    def keys(self) -> list[str]:
        return [run.key for run in self.bases] + [key for arm in self.arms for key in arm.keys]


def make_layout(plan: Plan) -> Layout:
    """The layout of a plan's runs. A run of role `base` is shared by arms and stands apart."""
    runs = [run for run in plan.runs if run.role != "base"]
    axes = _varied_axes(runs)
    reference = _reference(
        [(dict(c.of), dict(c.against)) for c in plan.case.claims if c.against is not None], axes
    )
    compared = tuple(axis for axis in axes if axis in reference)
    if not compared and axes:
        compared = axes[:1]
    conditions = tuple(axis for axis in axes if axis not in compared)
    groups: dict[tuple[tuple[str, Any], ...], list[PlannedRun]] = {}
    for run in runs:
        groups.setdefault(_without_seed(run.labels), []).append(run)
    treatments = {labels: tuple(_text(dict(labels).get(axis)) for axis in compared) for labels in groups}
    appearance = looks(treatments.values(), tuple(_text(reference.get(axis)) for axis in compared))
    arms: dict[tuple[tuple[str, Any], ...], Arm] = {}
    for labels in sorted(groups, key=lambda item: dict(item) != _baseline_labels(dict(item), reference)):
        mine = dict(labels)
        target = _freeze(_baseline_labels(mine, reference))
        arms[labels] = Arm(
            labels=labels,
            treatment=treatments[labels],
            name=labels_text({axis: mine[axis] for axis in compared if axis in mine}) or "all runs",
            full_name=labels_text({axis: mine[axis] for axis in axes if axis in mine}) or "all runs",
            panel=labels_text({axis: mine[axis] for axis in conditions if axis in mine}, ", "),
            look=appearance[treatments[labels]],
            runs=tuple(groups[labels]),
            baseline=arms.get(target) if target != labels else None,
        )
    panels = tuple(dict.fromkeys(arms[labels].panel for labels in groups))
    return Layout(
        arms=tuple(sorted((arms[labels] for labels in groups), key=lambda arm: panels.index(arm.panel))),
        bases=tuple(run for run in plan.runs if run.role == "base"),
        panels=panels,
        seeds=tuple(sorted({run.spec.seed for run in runs})),
        compared_axes=compared,
        condition_axes=conditions,
        reference=reference,
    )


def _varied_axes(runs: Sequence[PlannedRun]) -> tuple[str, ...]:
    """Axes other than the seed that take more than one value, in the order of the matrix."""
    values: dict[str, set[str]] = {}
    labels = [run.labels for run in runs]
    for axis, value in (item for one in labels for item in one.items()):
        values.setdefault(axis, set()).add(_text(value))
    return tuple(
        axis
        for axis, seen in values.items()
        if axis != SEED and (len(seen) > 1 or any(axis not in one for one in labels))
    )


def _reference(
    claims: Sequence[tuple[dict[str, Any], dict[str, Any]]], axes: Sequence[str]
) -> dict[str, Any]:
    """Per compared axis, the value that most claims compare with.

    An axis that claims hold equal on both sides more than twice as often as they vary it is a condition,
    though a claim or two may look across it.
    """
    equal: Counter[str] = Counter()
    votes: dict[str, Counter[str]] = {}
    for of, against in claims:
        for axis, value in against.items():
            if axis not in axes or axis not in of or isinstance(value, list | tuple):
                continue
            if of[axis] == value:
                equal[axis] += 1
            else:
                votes.setdefault(axis, Counter())[json.dumps(value)] += 1
    return {
        axis: json.loads(votes[axis].most_common(1)[0][0])
        for axis in axes
        if axis in votes and equal[axis] <= 2 * votes[axis].total()
    }


def _baseline_labels(labels: Mapping[str, Any], reference: Mapping[str, Any]) -> dict[str, Any]:
    return {axis: reference.get(axis, value) for axis, value in labels.items()}


def _without_seed(labels: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    return _freeze({axis: value for axis, value in labels.items() if axis != SEED})


def _freeze(labels: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Hashable, and the same for the same labels in any order."""
    return tuple(sorted(labels.items()))


def _text(value: Any) -> str:
    return "" if value is None else str(value)
