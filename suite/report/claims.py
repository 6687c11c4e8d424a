"""A claim and its verdict as the pages show them: words, numbers, and the interval drawn against the rule."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from results.records import digits_between
from suite.judge.measures import Measure, UnknownMeasureError, find_measure
from suite.report.scale import Scale, linear
from suite.report.svg import axis_strip, interval_strip, strip_sentence
from suite.report.words import (
    NOTHING,
    VERDICTS,
    effect_text,
    from_id,
    given,
    heading,
    interval_text,
    labels_text,
    moment,
    number,
    rule_text,
    slug,
    unit_text,
)


@dataclass(frozen=True)
class SeedRow:
    """One pair of a claim: its seed, both values and their difference, as text."""

    seed: str
    of: str
    against: str
    effect: str


@dataclass(frozen=True)
class ClaimView:
    """Everything a template says about one claim at one size."""

    id: str
    anchor: str
    case: str
    size: str
    page: str
    """Path of the case's page from the site's root; "" where the site has none."""
    headline: str
    where: str
    why: str
    verdict: str
    shape: str
    reason: str
    effect: str
    interval: str
    confidence: str
    strip: Markup
    axis: Markup
    rule: str
    measure: str
    meaning: str
    compared: str
    fidelity: str
    num_pairs: int
    seeds_needed: int | None
    machine: str
    when: str
    seeds: tuple[SeedRow, ...]
    run_keys: tuple[str, ...]
    paper: Mapping[str, Any] | None

    @property
    def decided(self) -> bool:
        """Whether runs spoke, one way or the other."""
        return self.verdict not in ("not run", "not comparable")


def claim_view(row: Mapping[str, Any], page: str = "") -> ClaimView:
    """The view of a row of the `verdicts` table. `page` is the case's page, where there is one."""
    claim: Mapping[str, Any] = row.get("claim") or {}
    paper = claim.get("paper")
    measure = _measure(str(row["measure"]))
    unit = _unit(measure)
    is_ratio = measure is not None and measure.comparison == "ratio"
    effect, low, high = _float(row.get("effect")), _float(row.get("low")), _float(row.get("high"))
    pairs: Sequence[Mapping[str, Any]] = row.get("pairs") or []
    seeds = [math.exp(p["effect"]) if is_ratio else p["effect"] for p in pairs if p.get("effect") is not None]
    expect: Mapping[str, Any] = claim.get("expect") or {}
    rule = rule_ends(expect, measure)
    reference = 1.0 if is_ratio else 0.0
    scale = _scale(effect, low, high, seeds, rule, reference)
    confidence = _float(row.get("confidence"))
    drawn = effect is not None or rule is not None
    label = strip_sentence(effect, low, high, len(seeds)) + f"; the rule is {rule_text(expect, unit)}"
    return ClaimView(
        id=str(row["claim_id"]),
        anchor=slug(str(row["claim_id"])),
        case=str(row["case_name"]),
        size=str(row["size"]),
        page=page,
        headline=_headline(claim, row),
        where=str((paper or {}).get("where") or ""),
        why=str(claim.get("why") or ""),
        verdict=str(row["verdict"]),
        shape=VERDICTS.get(str(row["verdict"]), ("dash", ""))[0],
        reason=str(row.get("reason") or ""),
        effect=_effect(effect, unit, measure, digits_between(low, high)),
        interval=interval_text(low, high),
        confidence=f"{confidence:.0%}" if confidence else "",
        strip=interval_strip(
            scale, effect, low, high, seeds=seeds, rule=rule, reference=reference, label=label
        )
        if drawn
        else Markup(""),
        axis=axis_strip(scale) if drawn else Markup(""),
        rule=rule_text(expect, unit),
        measure=str(row["measure"]),
        meaning=measure.statistic.meaning if measure else "",
        compared=_compared(claim),
        fidelity=str(row.get("fidelity") or ""),
        num_pairs=int(row.get("num_pairs") or 0),
        seeds_needed=row.get("seeds_needed"),
        machine=str(row.get("machine") or ""),
        when=moment(row.get("decided_at")),
        seeds=tuple(_seed_row(pair, unit, is_ratio) for pair in pairs),
        run_keys=tuple(row.get("run_keys") or ()),
        paper=paper,
    )


def rule_ends(expect: Mapping[str, Any], measure: Measure | None) -> tuple[float, float] | None:
    """The range of effects in which the claim's rule is met, in the measure's unit."""
    given = {name: value for name, value in expect.items() if value is not None}
    if not given:
        return None
    name, value = next(iter(given.items()))
    if name == "within":
        return float(value[0]), float(value[1])
    if name in ("above", "at_least"):
        return float(value), math.inf
    if name in ("below", "at_most"):
        return -math.inf, float(value)
    ratio = measure is not None and measure.comparison == "ratio"
    if measure is not None and measure.direction == "higher":
        return (1.0 if ratio else 0.0) - float(value), math.inf
    return -math.inf, (1.0 if ratio else 0.0) + float(value)


def _scale(
    effect: float | None,
    low: float | None,
    high: float | None,
    seeds: Sequence[float],
    rule: tuple[float, float] | None,
    reference: float,
) -> Scale:
    bounds = [bound for bound in rule or () if math.isfinite(bound)]
    shown = [v for v in (effect, low, high) if v is not None and math.isfinite(v)]
    # Linear always: how far the effect lies from the rule is what the strip is for.
    room = [2 * bound - reference for bound in bounds if not shown]
    return linear([*shown, *seeds, *bounds, *room, reference], pad=0.1)


def _measure(name: str) -> Measure | None:
    try:
        return find_measure(name)
    except UnknownMeasureError:
        return None


def _unit(measure: Measure | None) -> str:
    """The unit behind an effect: `times` for a ratio of two runs, "" for a share or a bare number."""
    if measure is None:
        return ""
    if measure.comparison == "ratio":
        return "times"
    return "" if measure.unit in ("ratio", "1", "count") else measure.unit


def _effect(effect: float | None, unit: str, measure: Measure | None, digits: int) -> str:
    """The effect in its unit; a plus only where a sign says something, every digit of what is exact."""
    if effect is not None and measure is not None and measure.is_exact and unit == "times":
        return f"{given(effect)}×"
    if (
        effect is None
        or measure is None
        or measure.has_direction
        or unit == "bytes"
        or not math.isfinite(effect)
    ):
        return effect_text(effect, unit, digits)
    return f"{given(effect) if measure.is_exact else number(effect, digits)}{unit_text(unit)}"


def _headline(claim: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    """What the paper says; where no paper is quoted, the claim's name in words."""
    text = str((claim.get("paper") or {}).get("says") or from_id(row["claim_id"]))
    return heading(text.strip())


def _compared(claim: Mapping[str, Any]) -> str:
    of = labels_text(claim.get("of") or {})
    if claim.get("fit"):
        return f"{of}, for each of {claim['fit'][0]}"
    against = claim.get("against")
    if not against:
        return of
    # What both sides share is said once.
    shared = {k: v for k, v in against.items() if (claim.get("of") or {}).get(k) == v}
    differing = labels_text({k: v for k, v in against.items() if k not in shared}) or "the same runs"
    return f"{of} against {differing}"


def _seed_row(pair: Mapping[str, Any], unit: str, is_ratio: bool) -> SeedRow:
    effect = pair.get("effect")
    if effect is not None and is_ratio:
        effect = math.exp(effect)
    shown = "diverged" if pair.get("diverged") else effect_text(effect, unit)
    one = "" if unit == "times" else unit

    def side(name: str) -> str:
        value = pair.get(name)
        if value is None:
            return NOTHING
        return effect_text(value, one) if one == "bytes" else number(value, 5)

    return SeedRow(str(pair.get("seed", "")), side("of"), side("against"), shown)


def _float(value: Any) -> float | None:
    return None if value is None or math.isnan(value) else float(value)
