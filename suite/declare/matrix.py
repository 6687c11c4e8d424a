"""The points of a case's matrix at one size: axes, `exclude`, `include`, and what `--set` makes of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from suite.declare.errors import CaseError, Place, Problem, problem, shown
from suite.declare.labels import labelled, matches
from suite.declare.layers import merge
from suite.declare.overrides import Override
from suite.declare.yaml_loader import Node, Scalar

MAX_POINTS = 5_000
SIZE_KEYS = ("matrix", "include", "exclude", "start_from")
"""Keys of a size that are not fields of a run."""

Labels = dict[str, Scalar]
Value = tuple[Scalar, Node]
"""A label and the value it stands for."""


@dataclass(frozen=True)
class Point:
    """One run to be: its labels, the fields it writes, and what it starts from."""

    labels: Labels
    fields: Node
    start_from: Node | None
    """Fields of the shared base over base and size; None: from scratch."""


@dataclass
class Points:
    """All points of a size, and what is wrong with them."""

    arms: list[Point] = field(default_factory=list)
    excluded: list[Labels] = field(default_factory=list)
    overrides: list[Override] = field(default_factory=list)
    """The overrides of fields: those that name neither an axis nor the shared base."""
    base_overrides: list[Override] = field(default_factory=list)
    """The overrides of the shared base, without their `start_from.`."""
    problems: list[Problem] = field(default_factory=list)

    def add(self, labels: Labels, fields: Mapping[str, Node], place: Place, start_from: Node | None) -> None:
        self.arms.append(Point(labels, Node(dict(fields), place), start_from))


def points(root: Node, size: Node | None, overrides: Sequence[Override]) -> Points:
    """The points of a whole case `root` at a size, an entry of its `sizes`."""
    found = Points()
    axes = _axes(root, size, overrides, found)
    values = {name: _values(name, node, found.problems) for name, node in axes.items()}
    start_from = _start_from(_section(root, "start_from"), _section(size, "start_from"))
    entries = [item for part in (root, size) for item in _section(part, "include").items]
    told_apart = set(axes) | _selected_by(root)
    included = [_included(entry, told_apart, overrides, found.problems) for entry in entries]
    total = sum(math.prod(len(choice) for choice in each.values()) for each in (values, *included))
    if total > MAX_POINTS:
        place = _section(size, "matrix").place if _section(size, "matrix").items else root.place
        message = f"the matrix has {total:,} points; the limit is {MAX_POINTS:,}"
        found.problems.append(problem((root.get("matrix") or Node(None, place)).place, message))
        return found
    exclude = [
        item.plain() for part in (root, size) for item in _section(part, "exclude").items if item.entries
    ]
    for labels, fields in _product(values):
        if any(matches(labels, where) for where in exclude):
            found.excluded.append(labels)
        else:
            found.add(labels, fields, _written_at(root, size), start_from)
    for entry, choices in zip(entries, included, strict=True):
        own = entry.entries.get("start_from")
        base = start_from if own is None else _start_from(start_from or _NOTHING, own)
        for labels, fields in _product(choices):
            if own is not None:
                labels["start_from"] = "none" if base is None else "own"
            found.add(labels, fields, entry.place, base)
    return found


def _section(part: Node | None, key: str) -> Node:
    """An entry of the case or the size; an empty one where it is not written."""
    found = part.get(key) if part else None
    return found or _NOTHING


_NOTHING = Node({}, Place(""))


def _written_at(root: Node, size: Node | None) -> Place:
    """Where to point when a matrix point lacks something: the size, else `base`, else the top."""
    part = size or root.get("base") or root
    return part.key_place or part.place


def _axes(root: Node, size: Node | None, overrides: Sequence[Override], found: Points) -> dict[str, Node]:
    """Axis -> list of values; sorts the overrides into those of axes, of the shared base and of fields."""
    axes = {**_section(root, "matrix").entries, **_section(size, "matrix").entries}
    axes = {name: node for name, node in axes.items() if node.items}
    for override in overrides:
        if override.axis in axes or override.names_axis:
            node = override.node
            axes[override.axis] = node if node.items else Node([node], node.place, node.key_place)
        elif override.path.startswith("start_from."):
            path = override.path.removeprefix("start_from.")
            found.base_overrides.append(replace(override, path=path))
        else:
            found.overrides.append(override)
    return axes


def _start_from(*written: Node) -> Node | None:
    """The layers of `start_from` over one another; null switches off what came before."""
    whole: Node | None = None
    for node in written:
        if node is not _NOTHING:
            whole = merge(whole, node) if node.value is not None else None
    return whole


def _values(name: str, axis: Node, problems: list[Problem]) -> list[Value]:
    """The axis' values; one that is written twice counts once."""
    found: dict[Scalar, Node] = {}
    for item in axis.items:
        try:
            label, node = labelled(name, item)
        except CaseError as error:
            problems += error.problems
            continue
        earlier = found.setdefault(label, replace(node, key_place=axis.key_place))
        if earlier.plain() != node.plain():
            problems.append(problem(item.place, f"{name}: two different values are called {shown(label)}"))
    return list(found.items())


def _selected_by(root: Node) -> set[str]:
    """Names of the labels that claims, figures and tables select runs by, or lay them out along."""
    parts = [part for key in ("claims", "figures", "tables") for part in _section(root, key).items]
    found = {
        name for part in parts for side in ("of", "against", "where") for name in _section(part, side).entries
    }
    axes = [part.get(key) for part in parts for key in ("x", "lines", "rows")]
    return found | {node.value for node in axes if node is not None and isinstance(node.value, str)}


def _included(
    entry: Node, told_apart: set[str], overrides: Sequence[Override], problems: list[Problem]
) -> dict[str, list[Value]]:
    """The fields of an `include` entry with their values.

    A field is a label where it tells runs apart: an axis, a list of values, one that a claim or a figure selects by.
    """
    fields = {name: node for name, node in entry.entries.items() if name != "start_from"}
    for override in overrides:
        if override.axis in fields:
            fields[override.axis] = override.node
    found: dict[str, list[Value]] = {}
    for name, node in fields.items():
        if node.value == []:
            problems.append(problem(node.place, f"include: {name} has no values"))
        if name not in told_apart and not isinstance(node.value, list) and "label" not in node.entries:
            found[name] = [(None, node)]
        else:
            values = node if isinstance(node.value, list) else Node([node], node.place, node.key_place)
            found[name] = _values(name, values, problems)
    return found


def _product(values: Mapping[str, list[Value]]) -> list[tuple[Labels, dict[str, Node]]]:
    """Labels and fields of every combination, the last axis running fastest."""
    combinations = itertools.product(*values.values())
    named = [dict(zip(values, combination, strict=True)) for combination in combinations]
    return [
        (
            {name: label for name, (label, _) in chosen.items() if label is not None},
            {name: node for name, (_, node) in chosen.items()},
        )
        for chosen in named
    ]
