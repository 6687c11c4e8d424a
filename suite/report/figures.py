"""Figures and tables that a case declares: a measure over an axis of the matrix, mean and interval over seeds.

Values of one seed are averaged over labels that neither axis names, as the judge does it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from suite.judge.measures import Measure, find_measure
from suite.judge.pairing import value_of_run
from suite.judge.statistics import paired_interval
from suite.report import plots
from suite.report.evidence import Evidence, Points
from suite.report.look import Look, looks
from suite.report.plots import Dot, Line
from suite.report.svg import swatch
from suite.report.words import (
    NOTHING,
    byte_text,
    given,
    interval_text,
    labels_text,
    number,
    plural,
    slug,
    unit_text,
)

if TYPE_CHECKING:
    from suite.declare import Figure, Plan, PlannedRun, Table

STEP = "step"
ALL = "all runs"


@dataclass(frozen=True)
class FigureView:
    """A figure, ready for its template. `plot` is a line chart; where it is empty, `rows` have strips."""

    id: str
    title: str
    why: str
    meaning: str
    unit: str
    x_label: str
    summary: str
    legend: tuple[tuple[str, Markup], ...]
    plot: Markup
    axis: Markup
    strips: tuple[tuple[str, Markup], ...]
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    num_seeds: int


@dataclass(frozen=True)
class TableView:
    """A table, ready for its template."""

    id: str
    title: str
    why: str
    row_label: str
    header: tuple[tuple[str, str], ...]
    """(measure in short, its name and what it means)"""
    rows: tuple[tuple[str, ...], ...]


def figure_views(plan: Plan, evidence: Evidence) -> tuple[FigureView, ...]:
    """The case's figures, those left out that have nothing to show yet."""
    views = (_figure_view(figure, n, plan, evidence) for n, figure in enumerate(plan.case.figures, 1))
    return tuple(view for view in views if view is not None)


def table_views(plan: Plan, evidence: Evidence) -> tuple[TableView, ...]:
    """The case's tables, those left out that have nothing to show yet."""
    views = (_table_view(table, n, plan, evidence) for n, table in enumerate(plan.case.tables, 1))
    return tuple(view for view in views if view is not None)


def _figure_view(figure: Figure, position: int, plan: Plan, evidence: Evidence) -> FigureView | None:
    measure = find_measure(figure.measure)
    runs = [
        run
        for run in plan.select(figure.where)
        if all(axis in run.labels for axis in (figure.x, figure.lines) if axis not in (None, STEP))
    ]
    points = evidence.points([run.key for run in runs], measure.statistic.metric)
    values = _values(figure, measure, runs, evidence, points)
    if not values:
        return None
    names = list(dict.fromkeys(name for name, _ in values))
    xs = list(dict.fromkeys(x for _, x in values))
    numeric = all(isinstance(x, int | float) and not isinstance(x, bool) for x in xs)
    if numeric:
        xs.sort()
    appearance = _looks(names)
    lines = [
        Line(
            name,
            appearance[name],
            tuple(_dot(x, values[name, x], measure) for x in xs if (name, x) in values),
        )
        for name in names
    ]
    unit = figure.measure + unit_text(measure.unit).replace("\N{NO-BREAK SPACE}", ", ")
    summary = _summary(figure, lines, unit)
    y = plots.scale_of([d for line in lines for d in line.dots], logarithmic=figure.log_y)
    plot = axis = Markup("")
    strips: tuple[tuple[str, Markup], ...] = ()
    if numeric:
        plot = plots.line_plot(lines, y, log_x=figure.log_x, label=summary)
    else:
        axis = plots.dot_axis(y)
        strips = tuple(
            (_text(x), plots.dot_strip(lines, x, y, f"{_text(x)}: {_spoken(lines, x)}")) for x in xs
        )
    return FigureView(
        id=f"figure-{position}-{slug(figure.title)[:40]}",
        title=figure.title,
        why=figure.why,
        meaning=measure.statistic.meaning,
        unit=unit,
        x_label=figure.x,
        summary=summary,
        legend=tuple((line.name, swatch(line.look)) for line in lines) if len(lines) > 1 else (),
        plot=plot,
        axis=axis,
        strips=strips,
        header=(figure.x, *(line.name for line in lines)),
        rows=tuple((_text(x), *(_cell(line, x) for line in lines)) for x in xs),
        num_seeds=max(len(seeds) for seeds in values.values()),
    )


def _values(
    figure: Figure, measure: Measure, runs: Sequence[PlannedRun], evidence: Evidence, points: Points
) -> dict[tuple[str, Any], list[float]]:
    """(line, x) -> one value a seed, in the order of the matrix."""
    found: dict[tuple[str, Any], dict[int, list[float]]] = {}
    for run in runs:
        name = labels_text({figure.lines: run.labels[figure.lines]}) if figure.lines else ALL
        triples = points.triples(measure.statistic.metric, run.key)
        by_x: Mapping[Any, list[tuple[str, int, float]]]
        if figure.x == STEP:
            steps = sorted({step for _, step, _ in triples})
            by_x = {step: [t for t in triples if t[1] == step] for step in steps}
        else:
            by_x = {run.labels[figure.x]: triples}
        for x, chosen in by_x.items():
            value = value_of_run(measure, evidence.status(run.key), chosen, run.spec.num_steps)
            if value is not None and math.isfinite(value):
                found.setdefault((name, x), {}).setdefault(run.spec.seed, []).append(value)
    return {place: [statistics.fmean(v) for v in seeds.values()] for place, seeds in found.items()}


def _dot(x: Any, values: Sequence[float], measure: Measure) -> Dot:
    mean, low, high = statistics.fmean(values), None, None
    if len(values) > 1 and not measure.is_exact:
        interval = paired_interval(values)
        low, high = interval.low, interval.high
    return Dot(x, mean, low, high)


def _looks(names: Sequence[str]) -> dict[str, Look]:
    """Colour and marker by name; the look of one line alone is ink."""
    if len(names) == 1:
        return {names[0]: Look(0, "", "circle")}
    found = looks((name,) for name in names)
    return {name: found[(name,)] for name in names}


def _cell(line: Line, x: Any) -> str:
    dot = line.at(x)
    if dot is None:
        return NOTHING
    ends = interval_text(dot.low, dot.high)
    return f"{number(dot.mean, 4)} {ends}" if ends and dot.low != dot.high else number(dot.mean, 4)


def _spoken(lines: Iterable[Line], x: Any) -> str:
    found = [(line.name, dot) for line in lines if (dot := line.at(x)) is not None]
    return ", ".join(
        f"{number(dot.mean)}" if name == ALL else f"{name} {number(dot.mean)}" for name, dot in found
    )


def _summary(figure: Figure, lines: Sequence[Line], unit: str) -> str:
    """What the figure shows, for those who do not see it."""
    dots = [(line.name, dot) for line in lines for dot in line.dots]
    low = min(dots, key=lambda item: item[1].mean)
    high = max(dots, key=lambda item: item[1].mean)
    of = plural(len(lines), "line") if len(lines) > 1 else "one line"

    def place(item: tuple[str, Dot]) -> str:
        name = "" if item[0] == ALL else f"{item[0]} at "
        return f"{number(item[1].mean)} ({name}{figure.x} {_text(item[1].x)})"

    return f"{figure.title}: {unit} over {figure.x}, {of}; lowest {place(low)}, highest {place(high)}."


def _text(value: Any) -> str:
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _table_view(table: Table, position: int, plan: Plan, evidence: Evidence) -> TableView | None:
    measures = [find_measure(name) for name in table.columns]
    runs = [run for run in plan.select(table.where) if table.rows in run.labels]
    keys = [run.key for run in runs]
    points = evidence.points(keys, *dict.fromkeys(measure.statistic.metric for measure in measures))
    values: dict[tuple[str, int], list[float]] = {}
    for run in runs:
        for column, measure in enumerate(measures):
            triples = points.triples(measure.statistic.metric, run.key)
            value = value_of_run(measure, evidence.status(run.key), triples, run.spec.num_steps)
            if value is not None:
                values.setdefault((_text(run.labels[table.rows]), column), []).append(value)
    if not values:
        return None
    names = dict.fromkeys(_text(run.labels[table.rows]) for run in runs)
    meanings = [f"{measure.name}: {measure.statistic.meaning}" for measure in measures]
    return TableView(
        id=f"table-{position}-{slug(table.title)[:40]}",
        title=table.title,
        why=table.why,
        row_label=table.rows,
        header=tuple(zip(_short([measure.name for measure in measures]), meanings, strict=True)),
        rows=tuple(
            (
                name,
                *(
                    _value(statistics.fmean(values[name, column]), measure)
                    if (name, column) in values
                    else NOTHING
                    for column, measure in enumerate(measures)
                ),
            )
            for name in names
        ),
    )


def _value(value: float, measure: Measure) -> str:
    """Bytes in binary units, an exact value without zeros that pad it, any other with four digits."""
    if measure.unit == "bytes":
        return byte_text(value)
    return given(value) if measure.is_exact else number(value, 4)


def _short(names: Sequence[str]) -> list[str]:
    """Names in words, without a first word that they all begin with."""
    first = names[0].partition("_")[0] + "_"
    shared = len(names) > 1 and all(name.startswith(first) for name in names)
    return [(name.removeprefix(first) if shared else name).replace("_", " ") for name in names]
