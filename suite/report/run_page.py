"""One page for a run: its spec, where and how it ran, its curves, and the way to make it again."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.spec import reads
from results.records import METRICS
from suite.execute.select import label_text
from suite.report.costs import Note, note_section, value_text
from suite.report.downloads import json_text, run_csv, run_json
from suite.report.evidence import Evidence, Points
from suite.report.health import scope_series
from suite.report.lines import MAX_POINTS, Chart, Series, line_chart
from suite.report.look import Look
from suite.report.scale import linear
from suite.report.series import Band, Curve, thin
from suite.report.words import (
    NOTHING,
    STATUSES,
    byte_text,
    count_text,
    duration,
    heading,
    labels_text,
    moment,
    number,
    plural,
)

if TYPE_CHECKING:
    from results.records import RunRow
    from suite.declare import PlannedRun

_CURVES = ("loss", "val_loss", "learning_rate", "gradient_norm", "loss_scale")
_SCOPED_CURVES = ("ffn_output_sqnr_db", "alignment_cosine_max", "activation_peak_over_rms")
_STUDY_CURVES = ("quant_sqnr_db", "quant_clipped_fraction", "quant_flushed_fraction")
"""A study of tensors has three scopes; a training run has one for each cast, which is too many lines."""
_INK = Look(0, "", "circle")
_RATES = ("tokens_per_s", "mfu", "model_flops_per_s", "train_seconds")
"""Of an emulated run these would pass for the format's speed, of ranks on one CPU for the scheme's."""
_RANK = re.compile(r"rank(\d+)(?:\.|$)")
_BY_RANK = ("peak_bytes", "state_bytes", "saved_bytes", "comm_count", "comm_bytes", "step_flops")
MAX_RANKS = 8
_BY_SCOPE = ("peak_bytes", "live_bytes", "probe_ms")
"""Metrics whose scopes are unlike things, so that a mean over them says nothing."""


@dataclass(frozen=True)
class Reading:
    """One recorded metric in a line: its last and mean value."""

    metric: str
    unit: str
    meaning: str
    num_points: int
    last: str
    mean: str


@dataclass(frozen=True)
class RankTable:
    """Metrics and scopes down, ranks across."""

    ranks: tuple[int, ...]
    num_left_out: int
    """Ranks beyond those shown."""
    rows: tuple[tuple[str, tuple[str, ...]], ...]
    """(metric[scope], one amount a rank)"""


@dataclass(frozen=True)
class RunPage:
    """A run, ready for its template."""

    key: str
    title: str
    case: str
    case_href: str
    row: RunRow
    shape: str
    status_meaning: str
    facts: tuple[tuple[str, str], ...]
    spec: tuple[tuple[str, tuple[tuple[str, str], ...]], ...]
    environment: tuple[tuple[str, str], ...]
    packages: tuple[tuple[str, str], ...]
    starts_from: str
    """Key of the run that this one began from; "" where it began from scratch."""
    starts_from_has_page: bool
    charts: tuple[Chart, ...]
    readings: tuple[Reading, ...]
    ranks: RankTable | None
    """What each rank of a step keeps and sends; None for other runs."""
    shares_cores: bool
    """Its ranks share one CPU."""
    cost: tuple[Reading, ...]
    """Times that are no speed: of emulation, or of ranks that share one CPU."""
    notes: tuple[Note, ...]
    command: str
    journal: str
    downloads: Mapping[str, str]

    @property
    def path(self) -> str:
        return f"runs/{self.key}.html"


def run_page(
    run: PlannedRun, case_href: str, evidence: Evidence, points: Points, keys_with_page: set[str]
) -> RunPage:
    """The page of a run that has a row. `points` hold all metrics of the run."""
    row = evidence.rows[run.key]
    environment = evidence.environment(run.key)
    base = run.spec.start_from.key if run.spec.start_from is not None else ""
    readings, cost = _readings(
        row, points, by_scope=not run.spec.is_training, shares_cores=run.spec.shares_cores
    )
    return RunPage(
        key=run.key,
        title=labels_text(run.labels) if run.role != "base" else "Base run, shared by the arms",
        case=row.case_name,
        case_href=case_href,
        row=row,
        shape=STATUSES[row.status][0],
        status_meaning=STATUSES[row.status][1],
        facts=_facts(run, row, environment),
        spec=_spec_groups(row.spec),
        environment=tuple(_environment(environment)),
        packages=tuple(sorted((str(n), str(v)) for n, v in (environment.get("packages") or {}).items())),
        starts_from=base,
        starts_from_has_page=base in keys_with_page,
        charts=tuple(_charts(run, points)),
        readings=readings,
        ranks=_ranks(points, run.key),
        shares_cores=run.spec.shares_cores,
        cost=cost,
        notes=note_section(evidence, [run.key]),
        command=_command(run, row),
        journal=f"journals/{row.key}/{row.attempt}/",
        downloads={
            f"runs/{run.key}.json": run_json(row, environment, points),
            f"runs/{run.key}.csv": run_csv(run.key, points),
            f"runs/{run.key}-spec.json": json_text(row.spec),
        },
    )


def _command(run: PlannedRun, row: RunRow) -> str:
    """The stored command, narrowed to this run; a base is trained by whatever needs it."""
    if not row.command or run.role == "base":
        return row.command or ""
    only = [f"--only={axis}={label_text(value)}" for axis, value in run.labels.items()]
    return f"{row.command} {shlex.join(only)}"


def _facts(run: PlannedRun, row: RunRow, environment: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    seconds = (row.ended_at - row.started_at).total_seconds() if row.started_at and row.ended_at else None
    facts = [
        ("machine", str(environment.get("machine") or NOTHING)),
        ("device", row.device or run.spec.device),
        *_what_it_does(run, row),
        ("started", moment(row.started_at)),
        ("took", duration(seconds)),
        ("attempts", str(row.attempt)),
        ("size", row.size),
    ]
    return tuple(facts)


def _what_it_does(run: PlannedRun, row: RunRow) -> list[tuple[str, str]]:
    spec = run.spec
    if spec.is_training:
        steps = plural(spec.num_steps, "step")
        return [
            ("parameters", count_text(row.num_parameters)),
            ("training", f"{count_text(spec.tokens)} tokens in {steps}"),
        ]
    of_step = (("model", spec.model), ("precision", spec.precision), ("parallelism", spec.parallelism))
    read = [(name, part.name) for name, part in of_step if reads(spec.task, name) and part.name != "none"]
    named = (("task", spec.task), ("format", spec.format), ("cast", spec.cast), *read)
    return [(name, text) for name, text in named if text]


def _spec_groups(spec: Mapping[str, Any]) -> tuple[tuple[str, tuple[tuple[str, str], ...]], ...]:
    """The resolved spec as tables: plain fields first, then one table a part; names are those of `--set`."""
    task = str(spec.get("task") or "")
    spec = {name: value for name, value in spec.items() if reads(task, name)}
    plain = [(name, value_text(value)) for name, value in spec.items() if not isinstance(value, dict)]
    groups = [("run", tuple((name, "none" if text == "not known" else text) for name, text in plain))]
    for name, value in spec.items():
        if isinstance(value, dict) and value and name != "start_from":
            groups.append((name, tuple(_flat(value, name))))
    return tuple(groups)


def _flat(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}.{name}")
        else:
            yield f"{prefix}.{name}", "none" if value is None else value_text(value)


def _environment(environment: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in environment.items():
        if name in ("environment_id", "packages") or value in (None, "", {}):
            continue
        if name == "details" and isinstance(value, dict):
            yield from (
                (str(part).replace("_", " "), value_text(detail)) for part, detail in sorted(value.items())
            )
        else:
            text = byte_text(value) if name.endswith("_bytes") else value_text(value)
            yield name.removesuffix("_bytes").replace("_", " "), text


def _charts(run: PlannedRun, points: Points) -> Iterator[Chart]:
    key = run.key
    for metric in _CURVES:
        curve = points.curve(metric, key)
        if len(curve) > 1:
            info = METRICS[metric]
            thinned = thin(curve, MAX_POINTS)
            band = _line([step for step, _ in thinned], [value for _, value in thinned])
            unit = "" if info.unit == "1" else f", {info.unit}"
            yield line_chart(
                metric.replace("_", "-"),
                heading(info.meaning),
                [Series(metric, _INK, band)],
                y_label=f"{metric}{unit}",
            )
    for metric in _SCOPED_CURVES if run.spec.is_training else _STUDY_CURVES:
        scopes = points.scopes(metric, key)
        if scopes and max(len(curve) for curve in scopes.values()) > 1:
            yield line_chart(
                metric.replace("_", "-"),
                heading(METRICS[metric].meaning.split(";")[0]),
                scope_series(scopes),
                y_label=metric,
                y=None if run.spec.is_training else linear(v for curve in scopes.values() for _, v in curve),
            )


def _line(steps: list[int], values: list[float]) -> Band:
    line = tuple(value if math.isfinite(value) else None for value in values)
    return Band(tuple(steps), line, line, line, 1)


def _readings(
    row: RunRow, points: Points, *, by_scope: bool, shares_cores: bool
) -> tuple[tuple[Reading, ...], tuple[Reading, ...]]:
    """Every recorded metric in a line, or with `by_scope` each of its scopes; times of emulated runs, and of
    ranks that share one CPU, stand apart; their rates are left out."""
    results: list[Reading] = []
    cost: list[Reading] = []
    no_speed = row.fidelity != "native" or shares_cores
    for name, info in METRICS.items():
        if no_speed and name in _RATES:
            continue
        apart = cost if no_speed and (info.kind == "speed" or name == "comm_ms") else results
        scopes = {s: c for s, c in points.scopes(name, row.key).items() if not _RANK.match(s)}
        if by_scope or name in _BY_SCOPE:
            apart += [r for scope in sorted(scopes) if (r := _reading(name, {scope: scopes[scope]}, scope))]
        elif reading := _reading(name, scopes, ""):
            apart.append(reading)
    return tuple(results), tuple(cost)


def _ranks(points: Points, key: str) -> RankTable | None:
    """Scopes of single ranks (`rank1.weights`), side by side; None where there are not two of them."""
    found: dict[str, dict[int, float]] = {}
    for metric in _BY_RANK:
        for scope, curve in points.scopes(metric, key).items():
            if match := _RANK.match(scope):
                rest = scope[match.end() :].lstrip(".")
                found.setdefault(f"{metric}[{rest}]" if rest else metric, {})[int(match[1])] = curve[-1][1]
    ranks = sorted({rank for values in found.values() for rank in values})
    if len(ranks) < 2:
        return None
    shown = ranks[:MAX_RANKS]
    rows = tuple(
        (
            name,
            tuple(
                NOTHING if rank not in values else _amount(name.partition("[")[0], values[rank])
                for rank in shown
            ),
        )
        for name, values in found.items()
        if any(values.values())
    )
    return RankTable(tuple(shown), len(ranks) - len(shown), rows)


def _amount(metric: str, value: float) -> str:
    unit = METRICS[metric].unit
    return byte_text(value) if unit == "bytes" else f"{value:,.0f}" if unit == "count" else number(value)


def _reading(metric: str, scopes: Mapping[str, Curve], scope: str) -> Reading | None:
    """Last and mean value over all of `scopes`; None where nothing finite was recorded."""
    info = METRICS[metric]
    triples = [(step, value) for curve in scopes.values() for step, value in curve if math.isfinite(value)]
    if not triples:
        return None
    last = max(step for step, _ in triples)
    ends = [value for step, value in triples if step == last]
    show = byte_text if info.unit == "bytes" else number
    return Reading(
        metric=f"{metric}[{scope}]" if scope else metric,
        unit="" if info.unit in ("1", "bytes") else info.unit,
        meaning=info.meaning + (f" (mean over {len(scopes)} scopes)" if len(scopes) > 1 else ""),
        num_points=len(triples),
        last=show(math.fsum(ends) / len(ends)),
        mean=show(math.fsum(value for _, value in triples) / len(triples)),
    )
