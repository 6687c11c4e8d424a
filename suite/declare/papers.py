"""Who said what: `cases/papers.yaml`, every number with how it was obtained.

suite list papers
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from suite.declare.errors import CaseError, problem, shown
from suite.declare.messages import problems_of
from suite.declare.written import Provenance, Written
from suite.declare.yaml_loader import read_yaml
from suite.paths import cases_dir


class Fact(Written):
    """One statement of a paper, or about it."""

    says: Annotated[str, Field(min_length=1)]
    value: float | str | list[float] | dict[str, float] | None = None
    unit: str = ""
    where: str = ""
    """Section, figure or table of the paper, or the file of its code."""
    conditions: dict[str, Any] = Field(default_factory=dict)
    provenance: Provenance
    """read: in the source itself; secondary: in an account of it; recalled; derived: computed from it."""
    source: str = ""
    """What was read: the abstract, released code, whose account."""


class Paper(Written):
    """A paper whose claims cases test."""

    key: str
    title: Annotated[str, Field(min_length=1)]
    authors: str
    year: int
    arxiv: str | None = None
    url: str | None = None
    venue: str = ""
    facts: tuple[Fact, ...] = ()
    disputes: tuple[Fact, ...] = ()
    """What others found that speaks against it, or limits it."""
    not_stated: tuple[str, ...] = ()
    """What a reproduction needs and the paper, as far as it was read, does not say."""


def papers() -> dict[str, Paper]:
    """All papers by key. Raises CaseError when the file is wrong."""
    return dict(_papers(cases_dir()))


@cache
def _papers(folder: Path) -> dict[str, Paper]:
    root = read_yaml(folder / "papers.yaml")
    found, problems = {}, []
    for key, node in root.entries.items():
        data = node.plain()
        if not isinstance(data, dict):
            problems.append(problem(node.place, f"{key}: a paper is a mapping (got {shown(data)})"))
            continue
        try:
            found[key] = Paper.model_validate({"key": key, **data})
        except ValidationError as error:
            problems += problems_of(error, node, Paper)
    if problems:
        raise CaseError(problems)
    return found
