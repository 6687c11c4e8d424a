"""Labels of runs: what an axis' value is called, and whether a run's labels are those a claim asks for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from harness.spec import RunSpec
from suite.declare.errors import CaseError, problem, shown
from suite.declare.layers import number
from suite.declare.messages import type_at, unwrap
from suite.declare.quantities import parse_quantity
from suite.declare.yaml_loader import Node, Scalar


def labelled(name: str, node: Node) -> tuple[Scalar, Node]:
    """A value of the field `name`: its label and the value itself. Raises CaseError.

    A mapping is called by its `label`, else its `name` (but an optimizer's name is the algorithm); null is
    called "none"; 400k is 400000.
    """
    if isinstance(node.value, list):
        message = f"{name}: a value cannot be a list (got {shown(node.plain())})"
        raise CaseError([problem(node.place, message)])
    if isinstance(node.value, dict):
        tag = node.value.get("label") or (None if name == "optimizer" else node.value.get("name"))
        if tag is None or tag.value is None or isinstance(tag.value, dict | list):
            other = " (its `name` is the algorithm)" if name == "optimizer" else " (or `name`)"
            message = f"{name}: a mapping needs a `label`{other}"
            raise CaseError([problem(node.place, message)])
        rest = {key: child for key, child in node.value.items() if key != "label"}
        return tag.value, replace(node, value=rest)
    if node.value is None:
        return "none", node
    label: Scalar = number(node.value, unwrap(type_at(RunSpec, name.split("."))))
    return label, node


def matches(labels: Mapping[str, Scalar], where: Mapping[str, Any]) -> bool:
    """True when every label in `where` is there and equal to its value, or to a member of a list value."""
    return all(name in labels and _is_one_of(labels[name], wanted) for name, wanted in where.items())


def _is_one_of(label: Scalar, wanted: Any) -> bool:
    members = wanted if isinstance(wanted, list | tuple) else (wanted,)
    return any(_equal(label, member) for member in members)


def _equal(label: Scalar, wanted: Any) -> bool:
    if wanted is None:
        return label == "none"
    if isinstance(label, bool) or isinstance(wanted, bool):
        return label is wanted
    if isinstance(wanted, str) and not isinstance(label, str):
        return label == parse_quantity(wanted)
    return bool(label == wanted)
