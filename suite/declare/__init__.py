"""What is asked: case files (YAML) become a `Case`, and a `Case` at a size becomes a `Plan`.

What is about whole cases is imported when it is first asked for: `suite ledger` needs presets alone.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from suite.declare.errors import CaseError, Problem
from suite.declare.papers import Fact, Paper, papers
from suite.declare.presets import Preset, preset_texts, presets
from suite.declare.yaml_loader import Scalar

if TYPE_CHECKING:
    from suite.declare.case import Case, CaseEntry, list_cases, load_case
    from suite.declare.plan import Plan, PlannedRun, expand
    from suite.declare.schema import Claim, Expect, Figure, PaperSays, Table

_LATER = {
    **dict.fromkeys(("Case", "CaseEntry", "list_cases", "load_case"), "case"),
    **dict.fromkeys(("Plan", "PlannedRun", "expand"), "plan"),
    **dict.fromkeys(("Claim", "Expect", "Figure", "PaperSays", "Table"), "schema"),
}
"""Name -> the module that it is in."""


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)
    globals()[name] = found
    return found


__all__ = [
    "Case",
    "CaseEntry",
    "CaseError",
    "Claim",
    "Expect",
    "Fact",
    "Figure",
    "Paper",
    "PaperSays",
    "Plan",
    "PlannedRun",
    "Preset",
    "Problem",
    "Scalar",
    "Table",
    "expand",
    "list_cases",
    "load_case",
    "papers",
    "preset_texts",
    "presets",
]
