"""Which runs a claim sets side by side, and which of those pairs are fit to be compared.

`of` and `against` runs are partners when every label is equal that neither selector names, or both name alike, the
seed among them. Seeds are the replication unit: where a selector leaves another axis open (three ageing values, say),
the effects of one seed are averaged over it first, so that three seeds never look like nine independent
pairs.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from suite.judge.measures import Measure

if TYPE_CHECKING:
    from suite.declare import Claim, PlannedRun


@dataclass(frozen=True)
class Unit:
    """The runs of one seed and one combination of the labels that the claim leaves open."""

    seed: int
    open_labels: tuple[tuple[str, Any], ...]
    of: tuple[PlannedRun, ...]
    against: tuple[PlannedRun, ...]

    @property
    def runs(self) -> tuple[PlannedRun, ...]:
        return self.of + self.against


@dataclass
class Pair:
    """One seed's part in a claim. Values are in the measure's unit; a ratio's effect is its logarithm."""

    seed: int
    of: float
    against: float | None
    effect: float
    of_keys: list[str] = field(default_factory=list)
    against_keys: list[str] = field(default_factory=list)


def unpaired_labels(claim: Claim) -> set[str]:
    """Labels that `of` and `against` name, but not alike: those that they are compared along."""
    against = claim.against
    if against is None:
        return set(claim.of)
    named = claim.of.keys() | against.keys()
    return {label for label in named if label not in claim.of or claim.of[label] != against.get(label)}


def make_units(
    of: Iterable[PlannedRun],
    against: Iterable[PlannedRun] | None,
    named: Iterable[str],
) -> tuple[list[Unit], list[PlannedRun]]:
    """Units in order of seed, and the runs of either side that have no partner.

    `named` are the labels that do not pair (`unpaired_labels`); `against` is None for a claim about single runs.
    """
    ignored = {*named, "seed"}
    sides: dict[tuple[int, tuple[tuple[str, Any], ...]], tuple[list[PlannedRun], list[PlannedRun]]] = (
        defaultdict(lambda: ([], []))
    )
    for side, runs in enumerate((of, against or ())):
        for run in runs:
            labels = tuple(sorted((k, v) for k, v in run.labels.items() if k not in ignored))
            sides[run.spec.seed, labels][side].append(run)
    units, single = [], []
    for (seed, labels), (left, right) in sorted(sides.items(), key=lambda item: repr(item[0])):
        if left and (right or against is None):
            units.append(Unit(seed, labels, tuple(left), tuple(right)))
        else:
            single.extend(left + right)
    units.sort(key=lambda unit: unit.seed)
    return units, single


def pair_by_seed(units: Sequence[Unit], values: Mapping[str, float], comparison: str) -> list[Pair]:
    """One pair a seed from the units whose runs all have a value; effects of ratios are logarithms.

    An infinite value stands for a diverged run. Seeds whose effect is undefined (both sides infinite, a
    ratio of values that are not positive) are left out.
    """
    by_seed: dict[int, list[Unit]] = defaultdict(list)
    for unit in units:
        by_seed[unit.seed].append(unit)
    pairs = []
    for seed, members in sorted(by_seed.items()):
        # A seed that lacks one of its units would be averaged over other conditions than its peers.
        if not all(run.key in values for unit in members for run in unit.runs):
            continue
        of = [statistics.fmean(values[run.key] for run in unit.of) for unit in members]
        against = [
            statistics.fmean(values[run.key] for run in unit.against) for unit in members if unit.against
        ]
        effects = [effect_of(x, against[i] if against else None, comparison) for i, x in enumerate(of)]
        effect = sum(effects) / len(effects)
        if not math.isnan(effect):
            pairs.append(
                Pair(
                    seed,
                    statistics.fmean(of),
                    statistics.fmean(against) if against else None,
                    effect,
                    [run.key for unit in members for run in unit.of],
                    [run.key for unit in members for run in unit.against],
                )
            )
    return pairs


def effect_of(of: float, against: float | None, comparison: str) -> float:
    """The pair's effect: the value itself, of - against, or log(of / against); NaN where undefined."""
    if against is None:
        return of
    if comparison == "gap":
        return of - against
    if of <= 0 or against <= 0 or (math.isinf(of) and math.isinf(against)):
        return math.nan
    return math.log(of) - math.log(against)


def value_of_run(
    measure: Measure, status: str, points: Sequence[tuple[str, int, float]], num_steps: int
) -> float | None:
    """A run's statistic; infinite for the loss of a diverged run, None where the run has nothing to say."""
    if status == "diverged":
        return math.inf if measure.statistic.infinite_when_diverged else None
    return measure.of_run(points, num_steps) if status == "ok" else None
