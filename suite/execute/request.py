"""run.json: what the worker needs to know, and what the database keeps about why a run was made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import suite
from suite.execute.folder import OutFolder

if TYPE_CHECKING:
    from results.store import Store
    from suite.declare import Plan, PlannedRun


@dataclass(frozen=True)
class AttemptRequest:
    """The content of run.json for one attempt, and the step it resumes at (None: from the start)."""

    attempt: int
    content: dict[str, Any]
    resume_step: int | None


def build_request(
    store: Store,
    out: OutFolder,
    plan: Plan,
    run: PlannedRun,
    *,
    command: str,
    auto: dict[str, dict[str, Any]],
    afresh: bool = False,
) -> AttemptRequest:
    """The next attempt at a run: on its base's final weights, from its own last checkpoint unless `afresh`.

    `start_checkpoint` is None where the base has no checkpoint that is still on disk.
    """
    attempt = store.next_attempt(run.key, out.journals)
    resume = None if afresh else store.resume_checkpoint(run.key)
    if resume is not None and not out.checkpoint(resume[0]).exists():
        resume = None
    start = store.final_checkpoint(run.depends_on) if run.depends_on is not None else None
    if start is not None and not out.checkpoint(start).exists():
        start = None
    content = {
        "run_id": f"{run.key}.{attempt}",
        "key": run.key,
        "attempt": attempt,
        "case": plan.case.name,
        "size": plan.size,
        "labels": dict(run.labels),
        "role": run.role,
        "spec": run.spec.model_dump(mode="json"),
        "fidelity": run.spec.fidelity,
        "num_ranks": run.spec.num_ranks,
        "start_checkpoint": start,
        "resume_checkpoint": resume[0] if resume else None,
        "command": command,
        "suite_version": suite.__version__,
        "auto": auto,
    }
    return AttemptRequest(attempt, content, resume[1] if resume else None)
