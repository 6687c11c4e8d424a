"""What measured or published products would give a whole model: Amdahl's law beside a sweep of products.

For each published speed-up of a model's training that a case claims, the share of the BF16 step that must be in the
faster products, and beside it the largest share that the model's FLOPs allow. Everything here is `predicted`.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from harness.ledger.amdahl import flop_share, gemm_speedup, layer_gemms, share_needed, step_speedup
from suite.report.evidence import Evidence
from suite.report.svg import percent
from suite.report.words import NOTHING, number

if TYPE_CHECKING:
    from harness.spec import ModelSpec
    from suite.declare import Claim, Plan

TASK = "gemm"
BASE = "bf16"
WITH_CAST = "gemm_with_cast_tflops"
MEASURES = {WITH_CAST: "casts included", "gemm_tflops": "operands cast before"}
"""Speeds of products, and what their ratios are called."""
STRIP_HEIGHT = 26


@dataclass(frozen=True)
class Source:
    """A speed-up of products and where it comes from."""

    text: str
    fidelity: str
    """native for a measured one; empty for a published one."""
    by_model: Mapping[str, float] | None = None
    """Measured: one a model, from its own shapes."""
    value: float = 0.0
    """Published: the same for all."""
    note: str = ""


@dataclass(frozen=True)
class ProjectionRow:
    """One model under one speed-up of its products."""

    model: str
    published: str
    source: str
    fidelity: str
    gemm_speedup: str
    needed: str
    possible: str
    limit: str
    strip: Markup
    verdict: str


@dataclass(frozen=True)
class Projection:
    """The section, ready for its template."""

    rows: tuple[ProjectionRow, ...]
    notes: tuple[str, ...]
    axis: Markup
    num_measured: int


def projection_section(plan: Plan, evidence: Evidence) -> Projection | None:
    """The projection of a case that times products and claims speed-ups of whole models; None for others."""
    from suite.declare.presets import presets

    claims = list(_whole_model_claims(plan))
    if not claims or all(run.spec.task != TASK for run in plan.runs):
        return None
    known = presets("models")
    models = {str(claim.of["model"]): known[str(claim.of["model"])] for claim in claims}
    measured = list(_measured(plan, evidence, models))
    sources = [*_published(plan), *measured]
    rows = [_row(claim, models[str(claim.of["model"])], source) for claim in claims for source in sources]
    notes = [source.note for source in measured if source.note]
    if not measured:
        notes.append(
            "No FP8 product was timed here, so the rows rest on published speed-ups of products alone."
        )
    return Projection(tuple(rows), tuple(notes), _axis(), len(measured))


def _whole_model_claims(plan: Plan) -> Iterator[Claim]:
    """Claims of a published speed-up whose own model they name: a published shape, not one of our ladder."""
    from suite.declare.presets import preset_texts

    texts = preset_texts("models")
    for claim in plan.case.claims:
        preset = texts.get(str(claim.of.get("model")))
        has_value = claim.paper is not None and isinstance(claim.paper.value, int | float)
        if (
            claim.measure == "throughput_ratio"
            and has_value
            and preset
            and "published_parameters" in preset.about
        ):
            yield claim


def _published(plan: Plan) -> Iterator[Source]:
    """Speed-ups of products that papers give, as the case's claims state them."""
    for claim in plan.case.claims:
        name, paper = claim.measure.removesuffix("_ratio"), claim.paper
        is_ratio_to_base = name != claim.measure and (claim.against or {}).get("gemm.kernel") == BASE
        if name in MEASURES and is_ratio_to_base and paper is not None and paper.value is not None:
            text = f"{paper.key or plan.case.papers[0]}, {MEASURES[name]}"
            yield Source(text, "", value=float(paper.value))


def _measured(plan: Plan, evidence: Evidence, models: Mapping[str, ModelSpec]) -> Iterator[Source]:
    """Speed-ups of each kernel over BF16, casts included, at the shapes timed here on a GPU."""
    runs = [run for run in plan.runs if run.spec.task == TASK and run.spec.device == "cuda"]
    points = evidence.points([run.key for run in runs], WITH_CAST)
    rates: dict[str, dict[tuple[int, int, int], list[float]]] = {}
    for run in runs:
        values = points.finite(WITH_CAST, run.key, "")
        if values and evidence.status(run.key) == "ok":
            spec = run.spec.gemm
            rates.setdefault(spec.kernel, {}).setdefault((spec.m, spec.k, spec.n), []).append(
                statistics.median(values)
            )
    medians = {
        kernel: {shape: statistics.fmean(values) for shape, values in shapes.items()}
        for kernel, shapes in rates.items()
    }
    base = medians.pop(BASE, {})
    for kernel, other in medians.items():
        tokens = max((m for m, _, _ in other), default=0)
        found = {
            name: gemm_speedup(layer_gemms(model, tokens), base, other) for name, model in models.items()
        }
        values_by_model = {name: speedup.value for name, speedup in found.items() if speedup is not None}
        if values_by_model:
            worst = max(speedup.worst_distance for speedup in found.values() if speedup is not None)
            note = (
                f"{kernel}: a layer's twelve products at {tokens:,} tokens, each at the speed of the nearest shape "
                f"that was timed; the farthest differs {worst:.2g}-fold in a size."
            )
            yield Source(f"{kernel}, timed here, casts included", "native", values_by_model, note=note)


def _row(claim: Claim, model: ModelSpec, source: Source) -> ProjectionRow:
    assert claim.paper is not None
    published = float(claim.paper.value)  # type: ignore[arg-type]
    possible = flop_share(model, model.max_seq_len)
    s = source.value or (source.by_model or {}).get(model.name, 0.0)
    if s <= 1:
        needed: float | None = None
        verdict = "products no faster than BF16 make no step faster"
    else:
        needed = share_needed(published, s)
        verdict = (
            f"would need {needed:.0%} of the step in products, more than all of it"
            if needed > 1
            else f"would need {needed:.0%}, more than the FLOPs' {possible:.0%}"
            if needed > possible
            else f"possible if {needed:.0%} of the BF16 step is in these products"
        )
    return ProjectionRow(
        model=model.name,
        published=number(published),
        source=source.text,
        fidelity=source.fidelity,
        gemm_speedup=number(s) if s else NOTHING,
        needed=NOTHING if needed is None else f"{needed:.0%}",
        possible=f"{possible:.0%}",
        limit=number(step_speedup(possible, s)) if s else NOTHING,
        strip=_strip(needed, possible, f"{model.name}, {source.text}: {verdict}"),
        verdict=verdict,
    )


def _strip(needed: float | None, possible: float, label: str) -> Markup:
    """A band up to the share that is possible, a dot at the share that is needed; beyond all, an arrow."""
    middle = STRIP_HEIGHT / 2
    parts = [
        Markup('<rect x="0" width="{}" y="4" height="{}" class="rule"/>').format(
            percent(possible), STRIP_HEIGHT - 8
        ),
        Markup('<line x1="{0}" x2="{0}" y1="2" y2="{1}" class="bound"/>').format(
            percent(possible), STRIP_HEIGHT - 2
        ),
    ]
    if needed is not None and needed <= 1:
        parts.append(
            Markup('<circle cx="{}" cy="{}" r="4.2" class="s0 dot"/>').format(percent(needed), middle)
        )
    elif needed is not None:
        parts.append(
            Markup('<svg x="100%" y="{}" class="at"><path d="M-8-5L-8 5L0 0z" class="s0 dot"/></svg>').format(
                middle
            )
        )
    return Markup('<svg class="strip" height="{}" role="img" aria-label="{}">{}</svg>').format(
        STRIP_HEIGHT, label, Markup("").join(parts)
    )


def _axis() -> Markup:
    ticks = [(0.0, "start"), (0.5, "middle"), (1.0, "end")]
    parts: list[Any] = [
        Markup(
            '<line x1="{0}" x2="{0}" y1="0" y2="4" class="tick"/><text x="{0}" y="16" text-anchor="{1}">{2}</text>'
        ).format(percent(at), anchor, f"{at:.0%}")
        for at, anchor in ticks
    ]
    return Markup('<svg class="strip axis" height="20" aria-hidden="true">{}</svg>').format(
        Markup("").join(parts)
    )
