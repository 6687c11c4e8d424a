"""Reading a case: its file, what it extends, `--set`, and every check that needs no run.

from suite.declare import load_case, expand
plan = expand(load_case("fp8_long_horizon"), "laptop")
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from suite.declare.check_shown import check_shown
from suite.declare.checks import all_points, check_claims, check_excludes, check_papers
from suite.declare.errors import CaseError, Problem, display_path, offer, problem, shown
from suite.declare.layers import merge
from suite.declare.messages import problems_of
from suite.declare.overrides import Override, parse_overrides
from suite.declare.plan import build, unread_fields
from suite.declare.schema import CaseFile, Claim, Figure, Table
from suite.declare.yaml_loader import Node, read_yaml
from suite.paths import cases_dir

_DATA_FILES = ("papers", "models")


@dataclass(frozen=True)
class Case:
    """A question with its matrix and its claims, checked."""

    name: str
    """Stem of the file's name."""
    path: Path
    question: str
    papers: tuple[str, ...]
    """Keys of papers.yaml, the main one first."""
    task: str
    base: dict[str, Any]
    matrix: dict[str, list[Any]]
    include: list[dict[str, Any]]
    exclude: list[dict[str, Any]]
    sizes: dict[str, dict[str, Any]]
    start_from: dict[str, Any] | None
    probes: dict[str, int]
    claims: tuple[Claim, ...]
    figures: tuple[Figure, ...]
    tables: tuple[Table, ...]
    notes: str
    overrides: tuple[str, ...] = ()
    """What `--set` changed, as it was typed."""
    root: Node = field(repr=False, compare=False, kw_only=True)
    """The case as written, with places; `extends` already merged."""


@dataclass(frozen=True)
class CaseEntry:
    """A built-in case as a list shows it."""

    name: str
    path: Path
    question: str
    papers: tuple[str, ...]
    sizes: tuple[str, ...]
    num_claims: int


def list_cases() -> list[CaseEntry]:
    """The built-in cases by name, from their files alone: nothing is expanded. Raises CaseError."""
    entries = []
    for name, path in sorted(_builtin().items()):
        root = _read(path)
        case = _validated(root)
        entries.append(
            CaseEntry(name, path, case.question, tuple(case.paper), tuple(case.sizes), len(case.claims))
        )
    return entries


def load_case(path_or_name: str | Path, overrides: Sequence[str] = ()) -> Case:
    """The case of a file, or a built-in one by name, with `--set` overrides.

    All sizes are expanded and checked, so that a mistake shows before anything runs; with overrides, which may
    suit one size alone, one sound size is enough, and `expand` tells of its own. Raises CaseError with all that
    is wrong.
    """
    path = _find(path_or_name)
    sets, problems = parse_overrides(overrides)
    root = _read(path)
    try:
        written: CaseFile | None = _validated(root)
    except CaseError as error:
        written = None
        problems += error.problems
    problems += _check(root, sets, written is None)
    if problems or written is None:
        raise CaseError(problems)
    return Case(
        name=path.stem,
        path=path,
        question=written.question,
        papers=tuple(written.paper),
        task=written.task,
        base=written.base,
        matrix=written.matrix,
        include=written.include,
        exclude=written.exclude,
        sizes={
            name: size.model_dump(exclude_unset=True) if size else {} for name, size in written.sizes.items()
        },
        start_from=written.start_from,
        probes=written.probes,
        claims=written.claims,
        figures=written.figures,
        tables=written.tables,
        notes=written.notes,
        overrides=tuple(overrides),
        root=root,
    )


def _check(root: Node, sets: list[Override], incomplete: bool) -> list[Problem]:
    """What is wrong beyond the file's shape: at every size, then between the sizes and the claims."""
    built = [build(root, name, sets, incomplete) for name in sizes_of(root)]
    by_size = [each.problems for each in built]
    problems = [each for found in by_size for each in found] if not sets or all(by_size) else []
    as_written = all_points(root)
    problems += unread_fields(built)
    problems += check_papers(root) + check_excludes(root, as_written) + check_claims(root, as_written)
    problems += check_shown(root, as_written)
    return problems


def sizes_of(root: Node) -> list[str | None]:
    """Names of the sizes; a case without any has one that is called nothing."""
    sizes = root.get("sizes")
    return list(sizes.entries) if sizes and sizes.entries else [None]


def _builtin() -> dict[str, Path]:
    return {path.stem: path for path in cases_dir().glob("*.yaml") if path.stem not in _DATA_FILES}


def _find(path_or_name: str | Path) -> Path:
    """The file of a path or a built-in name; `cases/NAME.yaml` is the built-in one where no such file is."""
    path = Path(path_or_name)
    builtin = _builtin()
    try:
        if path.is_file():
            return path
        there = path.exists()
    except (OSError, ValueError):
        there = False
    is_plain = path.parent in (Path(), Path("cases"))
    if is_plain and not there and path.suffix in ("", ".yaml", ".yml") and path.stem in builtin:
        return builtin[path.stem]
    what = "is a folder, not a case file" if there else "no such case file or built-in case"
    message = f"{what}{offer(path.stem, sorted(builtin))}"
    raise CaseError([Problem(str(path), 0, 0, message, "suite list cases")])


def _read(path: Path) -> Node:
    """The case's tree with `extends` merged in. Raises CaseError."""
    root = _mapping(read_yaml(path))
    name = root.entries.get("extends")
    if name is None or name.value is None:
        return root
    if not isinstance(name.value, str) or not name.value:
        raise CaseError([problem(name.place, f"extends: should name a case (got {shown(name.plain())})")])
    builtin = _builtin()
    candidates = [path.parent / name.value, path.parent / f"{name.value}.yaml", builtin.get(name.value)]
    try:
        found = next((c for c in candidates if c is not None and c.is_file()), None)
    except (OSError, ValueError):
        found = None
    if found is None:
        message = f"extends: no file beside this one and no built-in case (got {shown(name.value)})"
        raise CaseError(
            [problem(name.place, message + offer(name.value, sorted(builtin)), "suite list cases")]
        )
    parent = _mapping(read_yaml(found))
    if found.resolve() == path.resolve():
        raise CaseError([problem(name.place, "extends: a case cannot extend itself")])
    if "extends" in parent.entries:
        message = f"extends: {display_path(found)} extends another case itself; one level is allowed"
        raise CaseError([problem(name.place, message)])
    return _extended(parent, root)


def _mapping(root: Node) -> Node:
    if not isinstance(root.value, dict):
        message = f"a case is a mapping with a question (got {shown(root.plain())})"
        raise CaseError([problem(root.place, message, "suite schema")])
    return root


def _extended(parent: Node, child: Node) -> Node:
    """The child over its parent: mappings merge, lists replace, claims replace by id or are added."""
    merged = merge(parent, child)
    above, below = child.get("claims"), parent.get("claims")
    if above is None or below is None or not isinstance(above.value, list):
        return merged
    ids = {_claim_id(claim) for claim in above.items}
    claims = [claim for claim in below.items if _claim_id(claim) not in ids] + above.items
    entries = {**merged.entries, "claims": Node(claims, above.place, above.key_place)}
    return Node(entries, child.place)


def _claim_id(claim: Node) -> Any:
    node = claim.get("id")
    return node.value if node and isinstance(node.value, str) else id(claim)


def _validated(root: Node) -> CaseFile:
    try:
        return CaseFile.model_validate_json(json.dumps(root.plain()), strict=True)
    except ValidationError as error:
        raise CaseError(problems_of(error, root, CaseFile, "suite schema")) from None
