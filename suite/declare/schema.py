# ruff: noqa: RUF012 - pydantic copies a field's default
"""The shape of a case file: its keys, its claims and the rule that decides each of them.

What stands in `base`, `sizes` and `matrix` is written over the fields of a run and checked there; everything
else is checked here.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from suite.declare.quantities import parse_quantity
from suite.declare.written import Provenance, Written

RULES = ("above", "below", "at_least", "at_most", "within", "non_inferior_within")


def _number(value: Any) -> Any:
    """Quantities (`200B`) as numbers; anything else is left for pydantic to judge."""
    quantity = parse_quantity(value) if isinstance(value, str) else None
    return value if quantity is None else quantity


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Number = Annotated[float, BeforeValidator(_number, json_schema_input_type=float | str)]
Names = Annotated[list[str], BeforeValidator(_as_list, json_schema_input_type=str | list[str])]


class Expect(Written):
    """The decision rule: exactly one of these, in the unit of the measure."""

    above: Number | None = None
    """The whole confidence interval lies above this."""
    below: Number | None = None
    """The whole confidence interval lies below this."""
    at_least: Number | None = None
    at_most: Number | None = None
    within: tuple[Number, Number] | None = None
    """[low, high]"""
    non_inferior_within: Annotated[Number, Field(gt=0)] | None = None
    """One-sided: worse than `against` by less than this."""

    @model_validator(mode="after")
    def _check_one_rule(self) -> Expect:
        given = [name for name in RULES if getattr(self, name) is not None]
        if len(given) != 1:
            got = ", ".join(given) or "none"
            raise ValueError(f"exactly one rule is needed (got {got}); allowed: {', '.join(RULES)}")
        if self.within is not None and self.within[0] > self.within[1]:
            raise ValueError(f"within takes [low, high] (got {list(self.within)})")
        return self

    @property
    def rule(self) -> str:
        """Name of the rule that is given."""
        return next(name for name in RULES if getattr(self, name) is not None)


class PaperSays(Written):
    """What the paper states about a claim, in our words."""

    says: str = Field(min_length=1)
    key: str | None = None
    """Which paper, a key of papers.yaml; the case's first paper where not given."""
    where: str = ""
    """Section, figure or table."""
    value: Number | None = None
    unit: str = ""
    conditions: dict[str, Any] = Field(default_factory=dict)
    """Hardware, model, tokens, ...: under which the number was obtained."""
    provenance: Provenance | None = None
    """read: in the source itself; secondary: in an account of it; recalled; derived: computed from it."""
    not_stated: Names = []


class Claim(Written):
    """A sentence that the runs can support or contradict, with its rule written before they ran."""

    id: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    paper: PaperSays | None = None
    measure: str = Field(min_length=1)
    """Name of the measure that is computed from the runs."""
    of: dict[str, Any] = {}
    """Labels of the runs that the claim is about; a list matches any of its members."""
    against: dict[str, Any] | None = None
    """Labels of the runs it is compared with, paired by all labels not named."""
    fit: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    """Terms, such as `batch_size * seq_len^2`, of fields of the runs: judged is the first one's coefficient when all of
    them are fitted to the runs of `of` by least squares. `1` is the constant term."""
    needs: Literal["native"] | None = None
    """native: emulated numbers cannot decide this claim (speed)."""
    expect: Expect
    why: str = ""
    """Why this rule and these bounds."""


STEP = "step"
"""What a figure's x is called when it is the step and no axis of the case."""


class Shown(Written):
    """What figures and tables have in common."""

    title: str = Field(min_length=1)
    where: dict[str, Any] = {}
    """Labels of the runs that are shown; a list matches any of its members."""
    why: str = ""
    """What it is there to show."""


class Figure(Shown):
    """A measure over one axis of the matrix: mean and interval over seeds."""

    measure: str = Field(min_length=1)
    """Name of a measure of single runs (`suite list measures`)."""
    x: str = Field(min_length=1)
    """An axis: numbers make a line chart, names one row each; or `step`."""
    lines: str | None = None
    """An axis with one line for each of its values."""
    log_x: bool = False
    log_y: bool = False


class Table(Shown):
    """Measures side by side, one row for each value of an axis."""

    rows: str = Field(min_length=1)
    columns: tuple[str, ...] = Field(min_length=1)
    """Names of measures of single runs."""


class SizeFile(BaseModel):
    """One entry of `sizes`: fields of the run, and its own changes to the matrix."""

    model_config = ConfigDict(frozen=True, extra="allow", use_attribute_docstrings=True)

    matrix: dict[str, Annotated[list[Any], Field(min_length=1)] | None] = {}
    """Axes that replace the case's axes of the same name; null removes one."""
    include: list[dict[str, Any]] = []
    """Added to the case's."""
    exclude: list[dict[str, Any]] = []
    """Added to the case's."""
    start_from: dict[str, Any] | None = None
    """Written over the case's `start_from`."""


class CaseFile(Written):
    """A question, the runs that may answer it and the claims they test."""

    question: str = Field(min_length=1)
    """One sentence, ending in a question mark."""
    paper: Names = []
    """Key or keys of papers.yaml."""
    task: str = "pretrain"
    extends: str | None = None
    """A case whose keys this one starts from: a file beside it, or a built-in case; one level."""
    base: dict[str, Any] = {}
    """Fields of every run."""
    matrix: dict[str, Annotated[list[Any], Field(min_length=1)]] = {}
    """Axis (a field of the run, dotted where nested) -> its values; the runs are their product."""
    include: list[dict[str, Any]] = []
    """Runs beside the matrix; a list value stands for one run a member."""
    exclude: list[dict[str, Any]] = []
    """Labels of matrix points that are left out; a list matches any of its members."""
    sizes: dict[str, SizeFile | None] = {}
    """laptop, gpu, node, cluster: fields that scale the question to a machine."""
    start_from: dict[str, Any] | None = None
    """Fields, over base and size, of the one run whose final weights all others start from."""
    probes: dict[str, Annotated[int, Field(ge=0)]] = {}
    """Probe -> every how many steps it records."""
    claims: tuple[Claim, ...] = ()
    figures: tuple[Figure, ...] = ()
    """Drawn on the case's page."""
    tables: tuple[Table, ...] = ()
    """Shown on the case's page, after the figures."""
    notes: str = ""
    """Free text shown with the results."""
