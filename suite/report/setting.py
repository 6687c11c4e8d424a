"""What the paper did beside what was done here: without the conditions a gap means nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.spec import NO_PRECISION, reads
from suite.report.evidence import Evidence
from suite.report.words import count_text, given, join

if TYPE_CHECKING:
    from harness.spec import RunSpec
    from suite.declare import Plan
    from suite.declare.papers import Fact, Paper

_SHOWN = 6
"""Names listed before `and n more`."""


def _tensor_text(spec: RunSpec) -> str:
    tensor = spec.tensor
    text = f"{tensor.rows} × {tensor.cols}, {tensor.distribution.replace('_', ' ')}"
    if tensor.outlier_sigmas:
        text += f", {given(100 * tensor.outlier_share)}% {tensor.outliers} outliers of {given(tensor.outlier_sigmas)}σ"
    return text + (f", {tensor.steps} in sequence" if tensor.steps > 1 else "")


_STUDY_FACTS: dict[str, Callable[[RunSpec], str]] = {
    "format": lambda spec: spec.format,
    "cast": lambda spec: spec.cast,
    "tensor": _tensor_text,
    "attention": lambda spec: f"kernel {spec.attention.kernel}",
    "gemm": lambda spec: f"{spec.gemm.m} × {spec.gemm.k} × {spec.gemm.n}",
}
"""Aspect of a study, named as the field it reads -> its words."""


@dataclass(frozen=True)
class Row:
    """One aspect: the paper's side and this side, "" where a side has nothing to say."""

    aspect: str
    paper: str
    here: str


@dataclass(frozen=True)
class FactView:
    """A statement of a paper with how it was obtained."""

    says: str
    value: str
    where: str
    conditions: str
    provenance: str
    source: str


@dataclass(frozen=True)
class PaperView:
    """A paper as pages show it; `link` leads out of the site and is followed only by a click."""

    key: str
    title: str
    byline: str
    link: str
    link_text: str
    facts: tuple[FactView, ...]
    disputes: tuple[FactView, ...]
    not_stated: tuple[str, ...]


def paper_view(key: str, paper: Paper | None) -> PaperView:
    """The view of an entry of papers.yaml; a key without an entry shows as itself."""
    if paper is None:
        return PaperView(key, key, "", "", "", (), (), ())
    link = paper.url or (f"https://arxiv.org/abs/{paper.arxiv}" if paper.arxiv else "")
    return PaperView(
        key=key,
        title=paper.title,
        byline=", ".join(part for part in (paper.authors, paper.venue, str(paper.year)) if part),
        link=link if link.startswith(("https://", "http://")) else "",
        link_text=f"arXiv:{paper.arxiv}" if paper.arxiv else "paper",
        facts=tuple(_fact_view(fact) for fact in paper.facts),
        disputes=tuple(_fact_view(fact) for fact in paper.disputes),
        not_stated=tuple(paper.not_stated),
    )


def _fact_view(fact: Fact) -> FactView:
    return FactView(
        says=fact.says,
        value=_value_text(fact.value, fact.unit),
        where=fact.where,
        conditions=conditions_text(fact.conditions),
        provenance=fact.provenance,
        source=fact.source,
    )


def setting_rows(plan: Plan, evidence: Evidence, papers: Mapping[str, Paper]) -> tuple[Row, ...]:
    """The paper's conditions beside the facts of the runs.

    Conditions are those that the case's claims quote; where they quote none for an aspect, those of the main
    paper's statements.
    """
    ours = _here(plan, evidence)
    theirs = _merged(claim.paper.conditions for claim in plan.case.claims if claim.paper)
    main = papers.get(plan.case.papers[0]) if plan.case.papers else None
    for aspect, texts in _merged(fact.conditions for fact in (main.facts if main else ())).items():
        if aspect in ours:
            theirs.setdefault(aspect, texts)
    order = [*ours, *(aspect for aspect in theirs if aspect not in ours)]
    return tuple(
        Row(aspect.replace("_", " "), _names(theirs.get(aspect, [])), ours.get(aspect, ""))
        for aspect in order
    )


def _merged(conditions: Iterable[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Aspect -> the different texts it has, in order."""
    found: dict[str, list[str]] = {}
    for given_conditions in conditions:
        for aspect, value in given_conditions.items():
            text = _value_text(value, "")
            if text not in found.setdefault(aspect, []):
                found[aspect].append(text)
    return found


def _here(plan: Plan, evidence: Evidence) -> dict[str, str]:
    arms = [run for run in plan.runs if run.role != "base"]
    training = [run.spec for run in arms if run.spec.is_training]
    studies = [run.spec for run in arms if not run.spec.is_training]
    parameters = {
        row.num_parameters for run in arms if (row := evidence.rows.get(run.key)) and row.num_parameters
    }
    fidelities = [
        evidence.rows[run.key].fidelity if run.key in evidence.rows else run.spec.fidelity for run in arms
    ]
    bases = [run.spec for run in plan.runs if run.role == "base"]
    specs = training
    facts = {
        "task": _names(spec.task for spec in studies),
        **{
            name: (_phrases if name == "tensor" else _names)(
                text for spec in studies if reads(spec.task, name) and (text := describe(spec))
            )
            for name, describe in _STUDY_FACTS.items()
        },
        "model": _names(spec.model.name for spec in specs)
        + (f" ({join(sorted(count_text(p) for p in parameters), 'to')} parameters)" if parameters else ""),
        "tokens": _names(count_text(spec.tokens) for spec in specs) + (" a run" if specs else ""),
        "start": f"a base run of {_names(count_text(base.tokens) for base in bases)} tokens" if bases else "",
        "precision": _names(
            run.spec.precision.name
            for run in arms
            if reads(run.spec.task, "precision") and run.spec.precision != NO_PRECISION
        ),
        "feed-forward": _names(spec.model.ffn for spec in specs),
        "optimizer": _names(f"{spec.optimizer.name}, lr {spec.optimizer.lr:g}" for spec in specs),
        "batch": _names(f"{spec.batch_size} × {spec.seq_len} tokens" for spec in specs),
        "data": _names(f"{spec.data.corpus}, {spec.data.tokenizer}" for spec in specs),
        "seeds": str(len({run.spec.seed for run in arms})),
        "hardware": join(evidence.machines(run.key for run in plan.runs)) or "nothing run yet",
        "fidelity": join([f"{fidelities.count(name)} {name}" for name in dict.fromkeys(fidelities)])
        + " runs",
    }
    return {aspect: text for aspect, text in facts.items() if text}


def _names(values: Iterable[str]) -> str:
    found = list(dict.fromkeys(values))
    if len(found) > _SHOWN:
        return f"{', '.join(found[:_SHOWN])} and {len(found) - _SHOWN} more"
    return join(found)


def _phrases(values: Iterable[str]) -> str:
    """Like `_names`, of texts that have commas in them."""
    found = list(dict.fromkeys(values))
    more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return "; ".join(found[:_SHOWN]) + more


def conditions_text(conditions: Mapping[str, Any]) -> str:
    """`hardware 256 Gaudi2; model 7B`."""
    return "; ".join(
        f"{name.replace('_', ' ')} {_value_text(value, '')}" for name, value in conditions.items()
    )


def _value_text(value: Any, unit: str) -> str:
    if value is None:
        return ""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_value_text(part, unit)}" for name, part in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_value_text(part, unit) for part in value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"{value} {unit}".strip()
    text = count_text(value) if abs(value) >= 1e4 else given(value)
    return f"{text} {unit}".strip()
