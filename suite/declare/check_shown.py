"""Checks of a case's figures and tables: measures that exist, axes that runs have, numbers where a scale needs them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from suite.declare.checks import check_labels
from suite.declare.errors import Problem, offer, problem, shown
from suite.declare.labels import matches
from suite.declare.matrix import Labels, Points
from suite.declare.schema import STEP
from suite.declare.yaml_loader import Node


def check_shown(root: Node, sizes: Sequence[Points]) -> list[Problem]:
    """What is wrong with `figures` and `tables`, at the place of each name."""
    arms = [arm.labels for found in sizes for arm in found.arms]
    problems: list[Problem] = []
    for figure in _entries(root, "figures"):
        chosen = _chosen(figure, arms, problems)
        problems += _check_measure(figure.get("measure"), "measure")
        axes = [name for key in ("x", "lines") if (name := _text(figure.get(key))) is not None]
        problems += [
            each
            for key in ("x", "lines")
            for each in _check_axis(figure.get(key), key, chosen, steps_too=key == "x")
        ]
        problems += _check_numbers(figure, chosen)
        if len(axes) == 2 and axes[0] == axes[1]:
            node = figure.get("lines") or figure
            problems.append(problem(node.place, f"lines: {axes[0]} is the figure's x already"))
    for table in _entries(root, "tables"):
        chosen = _chosen(table, arms, problems)
        problems += _check_axis(table.get("rows"), "rows", chosen, steps_too=False)
        columns = table.get("columns")
        problems += [
            each for node in (columns.items if columns else []) for each in _check_measure(node, "columns")
        ]
    return problems


def _entries(root: Node, key: str) -> list[Node]:
    node = root.get(key)
    return [item for item in (node.items if node else []) if item.entries]


def _chosen(part: Node, arms: list[Labels], problems: list[Problem]) -> list[Labels]:
    """Labels of the runs that a figure or table shows; says so where there are none."""
    where = part.get("where")
    if where is None or not where.entries or not arms:
        return arms
    wrong = check_labels(where, arms, "where")
    chosen = [labels for labels in arms if matches(labels, where.plain())]
    if not wrong and not chosen:
        message = f"where: selects no run of this case at any size (got {shown(where.plain())})"
        wrong = [problem(where.place, message, "suite plan")]
    problems += wrong
    return chosen


def _check_measure(node: Node | None, key: str) -> list[Problem]:
    # Imported here: the judge's package imports this one for its types.
    from suite.judge.measures import UnknownMeasureError, find_measure

    name = _text(node)
    if node is None or name is None:
        return []
    try:
        measure = find_measure(name)
    except UnknownMeasureError as error:
        return [problem(node.place, f"{key}: {error}")]
    if measure.comparison:
        message = f"{key}: {name} compares two sets of runs; here stand measures of single runs"
        return [problem(node.place, message, "suite list measures")]
    return []


def _check_axis(node: Node | None, key: str, chosen: list[Labels], *, steps_too: bool) -> list[Problem]:
    name = _text(node)
    if node is None or name is None or not chosen or (steps_too and name == STEP):
        return []
    known = dict.fromkeys(label for labels in chosen for label in labels)
    if name in known:
        return []
    allowed = [*known, *([STEP] if steps_too else [])]
    return [problem(node.place, f"{key}: no run shown here has a label {shown(name)}{offer(name, allowed)}")]


def _check_numbers(figure: Node, chosen: list[Labels]) -> list[Problem]:
    """A logarithmic x needs numbers above 0."""
    node, x = figure.get("log_x"), _text(figure.get("x"))
    if node is None or node.value is not True or x is None:
        return []
    values: list[Any] = [labels[x] for labels in chosen if x in labels]
    wrong = [v for v in values if isinstance(v, bool | str) or v is None or v < 0]
    if not wrong:
        return []
    return [
        problem(
            node.place, f"log_x: {x} has values that are no numbers from 0 on (such as {shown(wrong[0])})"
        )
    ]


def _text(node: Node | None) -> str | None:
    return node.value if node is not None and isinstance(node.value, str) else None
