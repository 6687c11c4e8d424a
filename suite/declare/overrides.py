"""`--set PATH=VALUE`: the last layer over a case. The value is YAML; messages name the override itself.

suite run CASE --set optimizer.lr=1e-3 --set seed=[0,1] --set start_from.tokens=1M
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from suite.declare.errors import CaseError, Place, Problem, shown
from suite.declare.yaml_loader import Node, at, parse_yaml


@dataclass(frozen=True)
class Override:
    """One `--set PATH=VALUE`. A path that is an axis replaces the axis; `matrix.PATH` makes one."""

    path: str
    node: Node

    @property
    def axis(self) -> str:
        """The path as the name of an axis."""
        return self.path.removeprefix("matrix.")

    @property
    def names_axis(self) -> bool:
        return self.path.startswith("matrix.")

    def layer(self) -> Node:
        """A layer of fields with this one in it."""
        return Node({self.path: self.node}, self.node.place)


def parse_override(text: str) -> Override:
    """`optimizer.lr=1e-3`, `seed=[0, 1]`, `matrix.precision=[bf16]`. Raises CaseError."""
    place = Place(f"--set {text if text.isprintable() and len(text) <= 200 else shown(text)}")
    path, equals, value = text.partition("=")
    path = path.strip()
    if not equals or not all(step.strip() for step in path.split(".")):
        raise CaseError([Problem(place.file, 0, 0, "should be PATH=VALUE, such as optimizer.lr=1e-3")])
    try:
        data = parse_yaml(value, place.file).plain() if value.strip() else None
    except CaseError as error:
        raise CaseError([replace(each, line=0, column=0) for each in error.problems]) from None
    return Override(path, at(place, data, place))


def parse_overrides(texts: Sequence[str]) -> tuple[list[Override], list[Problem]]:
    """All of them, and what is wrong with those that could not be read."""
    found, problems = [], []
    for text in texts:
        try:
            found.append(parse_override(text))
        except CaseError as error:
            problems += error.problems
    return found, problems
