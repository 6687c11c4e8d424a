"""Named models, precisions, optimizers, parallelisms and ageings: data, each with where it comes from.

suite list precisions
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from harness.spec import AgeingSpec, ModelSpec, OptimizerSpec, ParallelismSpec, PrecisionSpec
from suite.declare.errors import CaseError, Place, offer, problem, shown
from suite.declare.messages import problems_of
from suite.declare.yaml_loader import Node, at, read_yaml
from suite.paths import cases_dir

ABOUT_KEYS = ("about", "source", "published_parameters")
"""Keys of a preset that describe it and are no part of the spec."""


@dataclass(frozen=True)
class _Kind:
    """A kind of preset: the run's field it fills, its file and its spec."""

    field: str
    file: str
    spec: type[BaseModel]
    named: bool = True
    """The preset's name is also the spec's `name`."""


KINDS = {
    "models": _Kind("model", "models.yaml", ModelSpec),
    "precisions": _Kind("precision", "presets/precisions.yaml", PrecisionSpec),
    "optimizers": _Kind("optimizer", "presets/optimizers.yaml", OptimizerSpec, named=False),
    "parallelisms": _Kind("parallelism", "presets/parallelisms.yaml", ParallelismSpec),
    "ageing": _Kind("ageing", "presets/ageing.yaml", AgeingSpec),
}
KIND_OF_FIELD = {kind.field: name for name, kind in KINDS.items()}
_PATTERN_NAME = re.compile(r"(?P<stem>.+)-(?P<k>[0-9]{1,2})")


@dataclass(frozen=True)
class Preset:
    """A preset as written: `data` fills the spec, `about` says what it is and who used it."""

    name: str
    data: dict[str, Any]
    about: dict[str, Any]


def presets(kind: str) -> dict[str, Any]:
    """The specs of a kind (models, precisions, optimizers, parallelisms, ageing) by name.

    A pattern such as `static-K` stands for one preset per whole number K; it is listed once, under that name.
    Raises KeyError for an unknown kind, CaseError when the data file is wrong.
    """
    return dict(_specs(kind, cases_dir()))


def preset_texts(kind: str) -> dict[str, Preset]:
    """The same presets as they are written, with their descriptions."""
    return dict(_written(kind, cases_dir()))


def preset_node(field: str, name: str, place: Place) -> Node:
    """The preset called `name` for a field of the run, as if written out at `place`. Raises CaseError."""
    kind = KIND_OF_FIELD[field]
    known = _written(kind, cases_dir())
    preset = known.get(name)
    match = _PATTERN_NAME.fullmatch(name)
    if match and f"{match['stem']}-K" in known:
        pattern = known[f"{match['stem']}-K"]
        preset = Preset(name, {**pattern.data, "name": name, "log2": int(match["k"])}, pattern.about)
    elif preset is not None and name.endswith("-K"):
        message = f"{field}: K stands for a whole number, as in {name[:-1]}12 (got {shown(name)})"
        raise CaseError([problem(place, message, f"suite list {kind}")])
    elif preset is None:
        message = f"{field}: unknown preset (got {shown(name)}){offer(name, known)}"
        raise CaseError([problem(place, message, f"suite list {kind}")])
    return at(place, preset.data)


@cache
def _written(kind: str, folder: Path) -> dict[str, Preset]:
    path = folder / KINDS[kind].file
    root = read_yaml(path)
    found = {}
    for name, node in root.entries.items():
        data = node.plain() or {}
        if not isinstance(data, dict):
            raise CaseError([problem(node.place, f"{name}: a preset is a mapping (got {shown(data)})")])
        about = {key: data.pop(key) for key in ABOUT_KEYS if key in data}
        if KINDS[kind].named:
            data = {"name": name, **data}
        found[name] = Preset(name, data, about)
    return found


@cache
def _specs(kind: str, folder: Path) -> dict[str, Any]:
    path, spec = folder / KINDS[kind].file, KINDS[kind].spec
    specs, problems = {}, []
    for name, preset in _written(kind, folder).items():
        try:
            specs[name] = spec.model_validate(preset.data)
        except ValidationError as error:
            root = read_yaml(path).get(name)
            assert root is not None
            problems += problems_of(error, root, spec)
    if problems:
        raise CaseError(problems)
    return specs
