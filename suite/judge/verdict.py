"""The verdict on one claim: a word, its numbers and the sentence that explains it."""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import suite
from suite.judge.decision import Word
from suite.judge.pairing import Pair

WORDS: tuple[Word, ...] = (
    "reproduced",
    "direction reproduced",
    "differs",
    "inconclusive",
    "not comparable",
    "not run",
)


@dataclass(frozen=True)
class Verdict:
    """What this database says about one claim at one size.

    `effect`, `low` and `high` are in `unit` (a ratio is a ratio, not its logarithm). `low` and `high` are
    the ends of the two-sided interval of coverage `confidence`, over the pairs without a diverged run; None
    where there is no interval. `effect` is infinite where every pair has a diverged run on the same side.
    """

    case_name: str
    size: str
    claim_id: str
    verdict: Word
    reason: str
    measure: str
    unit: str = ""
    effect: float | None = None
    low: float | None = None
    high: float | None = None
    confidence: float | None = None
    num_pairs: int = 0
    seeds_needed: int | None = None
    """Pairs that would decide if mean and spread stay as they are; None where none would or none need."""
    fidelity: str | None = None
    """The least of the runs': native, emulated, simulated, predicted."""
    machine: str | None = None
    """Where the plan's runs ran; one for all verdicts of a judging, which the next judging there replaces."""
    claim: Mapping[str, Any] = field(default_factory=dict)
    pairs: tuple[Pair, ...] = ()
    run_keys: tuple[str, ...] = ()

    def as_row(self) -> dict[str, Any]:
        """The columns of the `verdicts` table, decided now. Pairs carry no infinities: JSON has none."""
        return {
            "case_name": self.case_name,
            "size": self.size,
            "claim_id": self.claim_id,
            "verdict": self.verdict,
            "reason": self.reason,
            "measure": self.measure,
            "effect": self.effect,
            "low": self.low,
            "high": self.high,
            "confidence": self.confidence,
            "num_pairs": self.num_pairs,
            "seeds_needed": self.seeds_needed,
            "fidelity": self.fidelity,
            "machine": self.machine,
            "claim": dict(self.claim),
            "pairs": [pair_as_dict(pair) for pair in self.pairs],
            "run_keys": list(self.run_keys),
            "decided_at": datetime.datetime.now(datetime.UTC).replace(tzinfo=None),
            "suite_version": suite.__version__,
        }

    def as_json(self) -> dict[str, Any]:
        """The same for `--json`, with the unit; infinities are null (the reason tells of diverged runs)."""
        row = self.as_row() | {"unit": self.unit}
        row["decided_at"] = row["decided_at"].isoformat(timespec="seconds")
        return {name: finite_or_none(value) for name, value in row.items()}


def pair_as_dict(pair: Pair) -> dict[str, Any]:
    return {
        "seed": pair.seed,
        "of": finite_or_none(pair.of),
        "against": finite_or_none(pair.against),
        "effect": finite_or_none(pair.effect),
        "diverged": math.isinf(pair.effect),
        "of_keys": pair.of_keys,
        "against_keys": pair.against_keys,
    }


def finite_or_none(value: Any) -> Any:
    """`value`, or None in place of an infinite or NaN float."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def format_effect(value: float, unit: str, digits: int = 3) -> str:
    """Three significant digits and the unit, as in a table: `0.0831 nats/token`; bytes to the last one."""
    if unit == "bytes" and value == round(value):
        return f"{value:,.0f} bytes"
    number = f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.{digits}g}"
    return number if unit in ("", "1", "ratio", "count") else f"{number} {unit}"
