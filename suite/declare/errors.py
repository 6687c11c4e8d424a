"""Mistakes in case files, told so that they can be mended: place, value, what is allowed, nearest match."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_MAX_SHOWN = 60
_MAX_OFFERED = 14


@dataclass(frozen=True, order=True, slots=True)
class Place:
    """Where something was written; line and column count from 1. Line 0: `file` says it all (`--set a=b`)."""

    file: str
    line: int = 0
    column: int = 0


@dataclass(frozen=True, order=True, slots=True)
class Problem:
    """One mistake. `see` is a command that shows what would be right."""

    file: str
    line: int
    column: int
    message: str
    see: str = ""

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}:{self.column}" if self.line else self.file
        return f"{place}: {self.message}"


class CaseError(Exception):
    """All that is wrong with a case, a preset file or an override; `str()` gives one line a problem."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems: list[Problem] = sorted(set(problems))
        super().__init__(self.problems)

    def __str__(self) -> str:
        lines = [str(problem) for problem in self.problems]
        commands = sorted({problem.see for problem in self.problems if problem.see})
        if commands:
            lines.append(f"To see what is allowed: {', '.join(commands)}")
        return "\n".join(lines)


def problem(place: Place, message: str, see: str = "") -> Problem:
    return Problem(place.file, place.line, place.column, message, see)


def display_path(path: Path) -> str:
    """The path as messages show it: relative where it lies below the current folder."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def shown(value: Any) -> str:
    """`value` as messages show it: its repr, cut to a readable length."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 1] + "…"


def nearest(value: Any, options: Sequence[str]) -> str | None:
    """The option most like `value`, or None when none is near."""
    text = str(value)[:100]
    lowered = {option.lower(): option for option in options}
    found = difflib.get_close_matches(text.lower(), lowered, n=1, cutoff=0.6)
    return lowered[found[0]] if found else None


def offer(value: Any, options: Iterable[str]) -> str:
    """`; allowed: a, b, c; did you mean 'b'?`, shortened when there are many options."""
    names = list(options)
    near = nearest(value, names)
    listed = ", ".join(names[:_MAX_OFFERED])
    if len(names) > _MAX_OFFERED:
        listed += f" and {len(names) - _MAX_OFFERED} more"
    text = f"; allowed: {listed}" if names else ""
    return text + (f"; did you mean {near!r}?" if near else "")
