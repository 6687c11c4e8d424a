"""Least squares over runs: what a measure costs per unit of each term, as `34 sbh + 5 a s^2 b`.

A term is a product of fields of a run and whole powers of them, `batch_size * seq_len^2 * model.num_heads`, or `1`.
The fit minimises relative errors, so that large runs do not decide alone.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

from pydantic import BaseModel

from harness.spec import RunSpec
from suite.judge.pairing import Pair, Unit

CONSTANT = "1"
_FACTOR = re.compile(r"([a-z_]+(?:\.[a-z0-9_]+)*)(?:\^([1-9]))?")


class TermError(ValueError):
    """A term that is no product of fields of a run."""


@dataclass(frozen=True)
class Term:
    """A product of powers of a run's fields; no factors: the constant 1."""

    text: str
    factors: tuple[tuple[str, int], ...]

    def of(self, spec: RunSpec) -> float:
        return math.prod(float(_field(spec, name)) ** power for name, power in self.factors)


@dataclass(frozen=True)
class Fit:
    """Coefficients in the order of the terms, and the largest |fitted - measured| over measured."""

    coefficients: tuple[float, ...]
    largest_error: float


def read_terms(texts: Sequence[str]) -> tuple[Term, ...]:
    """The terms as written. Raises TermError for what is no product of numeric fields of a run."""
    return tuple(_term(text.strip()) for text in texts)


def _term(text: str) -> Term:
    if text == CONSTANT:
        return Term(text, ())
    factors = []
    for part in text.split("*"):
        match = _FACTOR.fullmatch(part.strip())
        if match is None:
            raise TermError(f"{text!r} is no product of fields such as `batch_size * seq_len^2`")
        name, power = match[1], int(match[2] or 1)
        if not _is_number(name):
            raise TermError(f"{text!r}: {name} is no number among a run's fields")
        factors.append((name, power))
    return Term(text, tuple(factors))


def _is_number(name: str) -> bool:
    fields = RunSpec.model_fields
    *parents, last = name.split(".")
    for parent in parents:
        kind = fields[parent].annotation if parent in fields else None
        if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
            return False
        fields = kind.model_fields
    return last in fields and fields[last].annotation in (int, float)


def _field(spec: RunSpec, name: str) -> float:
    value: float = reduce(getattr, name.split("."), spec)  # type: ignore[assignment]
    return value


def least_squares(specs: Sequence[RunSpec], values: Sequence[float], terms: Sequence[Term]) -> Fit | None:
    """The fit, or None where the runs do not tell the terms apart or a value is 0."""
    import numpy as np

    measured = np.array(values, dtype=np.float64)
    if len(values) < len(terms) or not measured.all():
        return None
    rows = np.array([[term.of(spec) for term in terms] for spec in specs]) / measured[:, None]
    scale = np.abs(rows).max(axis=0)
    found, _, rank, _ = np.linalg.lstsq(rows / scale, np.ones(len(values)), rcond=1e-9)
    if rank < len(terms):
        return None
    coefficients = found / scale
    return Fit(tuple(map(float, coefficients)), float(np.abs(rows @ coefficients - 1).max()))


def coefficients_by_seed(
    units: Sequence[Unit], values: Mapping[str, float], terms: Sequence[Term]
) -> tuple[list[Pair], list[str]]:
    """The first term's coefficient for each seed whose runs all have a value, and each fit in words."""
    by_seed: dict[int, list[Unit]] = defaultdict(list)
    for unit in units:
        by_seed[unit.seed].append(unit)
    pairs, notes = [], []
    for seed, members in sorted(by_seed.items()):
        runs = [run for unit in members for run in unit.of]
        if not all(run.key in values for run in runs):
            continue
        fit = least_squares([run.spec for run in runs], [values[run.key] for run in runs], terms)
        if fit is None:
            notes.append(f"seed {seed}: its {len(runs)} runs do not tell {len(terms)} terms apart")
            continue
        sum_of = " + ".join(f"{c:.6g} ({t.text})" for c, t in zip(fit.coefficients, terms, strict=True))
        notes.append(f"least squares over {len(runs)} runs: {sum_of}; largest error {fit.largest_error:.2g}")
        pairs.append(Pair(seed, fit.coefficients[0], None, fit.coefficients[0], [run.key for run in runs]))
    return pairs, notes
