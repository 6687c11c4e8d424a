"""One page for a case at one size: paper beside runs, verdicts, gaps, health, memory, outcomes, costs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from suite.report import costs, gaps, health, memory, outcomes, projection, reconcile, setting, volumes
from suite.report.arms import Layout, make_layout
from suite.report.claims import ClaimView, claim_view
from suite.report.costs import Note
from suite.report.downloads import json_text, runs_csv
from suite.report.evidence import Evidence
from suite.report.explanations import explanation
from suite.report.figures import FigureView, TableView, figure_views, table_views
from suite.report.words import slug

if TYPE_CHECKING:
    from suite.declare import Case, Plan
    from suite.declare.papers import Paper


@dataclass(frozen=True)
class CasePage:
    """A case at one size, ready for its template."""

    name: str
    size: str
    size_reason: str
    stem: str
    """File name without suffix, of the page and of its downloads."""
    question: str
    notes: tuple[str, ...]
    papers: tuple[setting.PaperView, ...]
    claims: tuple[ClaimView, ...]
    setting: tuple[setting.Row, ...]
    explanation: Markup
    """A drawing of what was found, for the case that has one."""
    figures: tuple[FigureView, ...]
    tables: tuple[TableView, ...]
    projection: projection.Projection | None
    """What products timed one by one would give whole models; None for most cases."""
    trains: bool
    """Whether any run trains; studies have no losses."""
    fidelities: tuple[str, ...]
    machines: tuple[str, ...]
    gaps: gaps.Gaps
    memory: memory.Memory
    reconciled: reconcile.Reconciliation
    volumes: volumes.Volumes
    health: health.Health
    outcomes: outcomes.Outcomes
    costs: costs.Costs
    remarks: tuple[Note, ...]
    command: str
    downloads: Mapping[str, str]
    """File name -> content."""

    @property
    def path(self) -> str:
        return f"cases/{self.stem}.html"


def case_stem(name: str, size: str) -> str:
    """File name of a case's page, without its suffix."""
    return slug(f"{name}-{size}")


def case_page(
    plan: Plan, evidence: Evidence, verdicts: Sequence[Mapping[str, Any]], papers: Mapping[str, Paper]
) -> CasePage:
    """The page of `plan`; `verdicts` are the stored rows of its case and size."""
    case, layout = plan.case, make_layout(plan)
    stem = case_stem(case.name, plan.size)
    points = evidence.points(layout.keys, "loss")
    losses = gaps.final_losses(layout, evidence, points)
    keys = paper_keys(case)
    claims = _claims(with_unjudged(plan, verdicts), f"cases/{stem}.html")
    rows = [evidence.rows[key] for key in layout.keys if key in evidence.rows]
    rows_of_setting = setting.setting_rows(plan, evidence, papers)
    gap_view = gaps.gap_section(layout, evidence, points, losses)
    return CasePage(
        name=case.name,
        size=plan.size,
        size_reason=plan.size_reason,
        stem=stem,
        question=case.question,
        notes=paragraphs(case.notes),
        papers=tuple(setting.paper_view(key, papers.get(key)) for key in keys),
        claims=claims,
        setting=rows_of_setting,
        explanation=explanation(case.name),
        figures=figure_views(plan, evidence),
        tables=table_views(plan, evidence),
        projection=projection.projection_section(plan, evidence),
        trains=any(run.spec.is_training for run in plan.runs),
        fidelities=tuple(dict.fromkeys(row.fidelity for row in rows)),
        machines=tuple(evidence.machines(layout.keys)),
        gaps=gap_view,
        memory=memory.memory_section(layout, evidence),
        reconciled=reconcile.reconciliation(plan, evidence),
        volumes=volumes.volume_section(plan, evidence),
        health=health.health_section(layout, evidence),
        outcomes=outcomes.outcome_section(layout, evidence, losses),
        costs=costs.cost_section(layout, evidence),
        remarks=costs.note_section(evidence, layout.keys),
        command=_command(plan, (row.command for row in rows)),
        downloads={
            f"{stem}.json": _case_json(plan, layout, evidence, verdicts, losses, rows_of_setting),
            f"{stem}-runs.csv": runs_csv(layout, evidence, losses),
        },
    )


def paper_keys(case: Case) -> tuple[str, ...]:
    """Papers of a case: its own, then those that single claims name."""
    named = [claim.paper.key for claim in case.claims if claim.paper and claim.paper.key]
    return tuple(dict.fromkeys([*case.papers, *named]))


def with_unjudged(plan: Plan, verdicts: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The plan's claims in the case's order, each with its stored verdicts or a `not run` row."""
    rows: dict[str, list[Mapping[str, Any]]] = {}
    for row in verdicts:
        if row["case_name"] == plan.case.name and row["size"] == plan.size:
            rows.setdefault(row["claim_id"], []).append(row)
    result: list[Mapping[str, Any]] = []
    for claim in plan.case.claims:
        empty = {
            "case_name": plan.case.name,
            "size": plan.size,
            "claim_id": claim.id,
            "verdict": "not run",
            "reason": "Not judged yet: no run of this case at this size is stored.",
            "measure": claim.measure,
            "claim": claim.model_dump(mode="json"),
        }
        result += rows.get(claim.id, [empty])
    return result


def _claims(rows: Iterable[Mapping[str, Any]], page: str) -> tuple[ClaimView, ...]:
    """Views with an anchor each: a claim judged on two machines is there twice."""
    seen: Counter[str] = Counter()
    views = []
    for row in rows:
        view = claim_view(row, page)
        seen[view.anchor] += 1
        count = seen[view.anchor]
        views.append(view if count == 1 else replace(view, anchor=f"{view.anchor}.{count}"))
    return tuple(views)


def paragraphs(text: str) -> tuple[str, ...]:
    """Free text as paragraphs, split at empty lines."""
    return tuple(part.strip() for part in re.split(r"\n\s*\n", text) if part.strip())


def _command(plan: Plan, commands: Iterable[str | None]) -> str:
    """The command that most of the stored runs came from; the plain one where none is stored."""
    stored = Counter(command for command in commands if command)
    return stored.most_common(1)[0][0] if stored else f"suite run {plan.case.name} --size {plan.size}"


def _case_json(
    plan: Plan,
    layout: Layout,
    evidence: Evidence,
    verdicts: Sequence[Mapping[str, Any]],
    losses: Mapping[str, float],
    rows_of_setting: Sequence[setting.Row],
) -> str:
    return json_text(
        {
            "case": plan.case.name,
            "size": plan.size,
            "question": plan.case.question,
            "verdicts": with_unjudged(plan, verdicts),
            "arms": [
                {
                    "labels": dict(arm.labels),
                    "baseline": dict(arm.baseline.labels) if arm.baseline else None,
                    "runs": [
                        {
                            "key": run.key,
                            "seed": run.spec.seed,
                            "status": evidence.status(run.key),
                            "final_loss": losses.get(run.key),
                        }
                        for run in arm.runs
                    ],
                }
                for arm in layout.arms
            ],
            "setting": [asdict(row) for row in rows_of_setting],
        }
    )
