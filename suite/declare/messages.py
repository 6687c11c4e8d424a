"""Pydantic's errors as problems at the line where the value was written."""

from __future__ import annotations

import types
from collections.abc import Collection, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from suite.declare.errors import Problem, nearest, offer, problem, shown
from suite.declare.yaml_loader import Node

_WANTED = {
    "int_type": "a whole number, or a quantity such as 400k, 2B, 80GiB",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
}
_BOUNDS = {
    "greater_than": ("gt", "must be above"),
    "greater_than_equal": ("ge", "must be at least"),
    "less_than": ("lt", "must be below"),
    "less_than_equal": ("le", "must be at most"),
}


def unwrap(annotation: Any) -> tuple[Any, ...]:
    """The types that a field may hold, without Annotated, Optional and Union."""
    if get_origin(annotation) is Annotated:
        return unwrap(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(kind for member in get_args(annotation) for kind in unwrap(member))
    return (annotation,)


def type_at(model: Any, path: Sequence[str | int]) -> Any:
    """The annotation at `path` inside a model; None where the path leaves it."""
    found: Any = model
    for step in path:
        inner: Any = None
        for kind in unwrap(found):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                info = kind.model_fields.get(str(step))
                inner = info.annotation if info else None
            elif get_origin(kind) in (list, tuple) and isinstance(step, int):
                inner = get_args(kind)[0]
            elif get_origin(kind) is dict:
                inner = get_args(kind)[1]
        if inner is None:
            return None
        found = inner
    return found


def fields_at(model: Any, path: Sequence[str | int]) -> list[str]:
    """Names of the fields that a mapping at `path` may have."""
    for kind in unwrap(type_at(model, path)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return list(kind.model_fields)
    return []


def problems_of(
    error: ValidationError,
    root: Node,
    model: type[BaseModel],
    see: str = "",
    unread: Collection[str] = (),
    needed: Collection[str] = (),
) -> list[Problem]:
    """Each error of `error` at the place of its value in `root`, an unknown key at the place of the key.

    A key that is missing because another was misspelt is not told twice. Keys in `unread` are not called
    missing; "*" stands for all of them. `needed` are keys that must be there though the model could do without;
    one that is not stands for whatever the model as a whole says.
    """
    found: list[dict[str, Any]] = [dict(details) for details in error.errors(include_url=False)]
    lacking = [key for key in needed if key not in root.entries]
    if lacking:
        found = [details for details in found if details["loc"]]
        found += [{"type": "missing", "loc": (key,)} for key in lacking]
    missing = [details["loc"] for details in found if details["type"] == "missing"]
    meant = set()
    for details in found:
        if details["type"] == "extra_forbidden":
            parent, key = details["loc"][:-1], details["loc"][-1]
            meant.add((*parent, nearest(key, fields_at(model, parent))))
    excused = [
        loc for loc in missing if loc in meant or "*" in unread or (len(loc) == 1 and loc[0] in unread)
    ]
    told = [details for details in found if not (details["type"] == "missing" and details["loc"] in excused)]
    return [_problem(details, root, model, see) for details in told]


def _problem(details: dict[str, Any], root: Node, model: type[BaseModel], see: str) -> Problem:
    path, kind = list(details["loc"]), str(details["type"])
    node, walked = root, list[str | int]()
    for step in path:
        child = node.get(step)
        if child is None:
            break
        node = child
        walked.append(step)
    name = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in walked).lstrip(".")
    start = f"{name}: " if name else ""
    got = f"(got {shown(node.plain())})"
    context = details.get("ctx", {})
    if kind == "extra_forbidden":
        allowed = offer(path[-1], fields_at(model, path[:-1]))
        parent = ".".join(str(step) for step in path[:-1])
        where = f" in {parent}" if parent else ""
        return problem(node.key_place or node.place, f"unknown key {shown(path[-1])}{where}{allowed}", see)
    if kind == "missing":
        return problem(node.key_place or node.place, f"{start}{path[-1]} is missing", see)
    if kind in _WANTED:
        message = f"{start}should be {_WANTED[kind]} {got}"
    elif kind in _BOUNDS:
        bound, text = _BOUNDS[kind]
        message = f"{start}{text} {context[bound]:g} {got}"
    elif kind == "literal_error":
        message = f"{start}unknown value {got}{offer(node.plain(), _choices(type_at(model, path)))}"
    elif kind == "value_error":
        message = f"{start}{context['error']}"
    elif kind in ("string_too_short", "too_short"):
        message = f"{start}must not be empty"
    elif kind == "string_pattern_mismatch":
        message = f"{start}letters, digits, and _ . - only, starting with a letter or digit {got}"
    else:
        message = f"{start}{details['msg']} {got}"
    return problem(node.place, message, see)


def _choices(annotation: Any) -> list[str]:
    return [str(c) for kind in unwrap(annotation) if get_origin(kind) is Literal for c in get_args(kind)]
