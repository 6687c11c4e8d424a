"""What is asked: case files (YAML) become a `Case`, and a `Case` at a size becomes a `Plan`."""

from suite.declare.case import Case, CaseEntry, list_cases, load_case
from suite.declare.errors import CaseError, Problem
from suite.declare.papers import Fact, Paper, papers
from suite.declare.plan import Plan, PlannedRun, expand
from suite.declare.presets import Preset, preset_texts, presets
from suite.declare.schema import Claim, Expect, Figure, PaperSays, Table
from suite.declare.yaml_loader import Scalar

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
