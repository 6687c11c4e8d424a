"""Checks between the parts of a case: names, claims and the runs they select, excludes and the matrix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.registry import PROBES, TASKS
from suite.declare.errors import Problem, offer, problem, shown
from suite.declare.labels import matches
from suite.declare.matrix import Labels, Points, points
from suite.declare.papers import papers
from suite.declare.yaml_loader import Node, Scalar


def all_points(root: Node) -> list[Points]:
    """The points of each size, as written: `--set` may narrow a case to runs that a claim does not select."""
    sizes = root.get("sizes")
    entries: Sequence[Node | None] = list(sizes.entries.values()) if sizes and sizes.entries else [None]
    return [points(root, size, []) for size in entries]


def check_papers(root: Node) -> list[Problem]:
    """Paper keys that papers.yaml does not have."""
    known = papers()
    node = root.get("paper")
    named = (node.items or [node]) if node is not None else []
    claims = root.get("claims")
    for claim in claims.items if claims else []:
        key = claim.get("paper", "key")
        if key is not None:
            named.append(key)
    found = []
    for node in named:
        if isinstance(node.value, str) and node.value not in known:
            message = f"paper: unknown key (got {shown(node.value)}){offer(node.value, known)}"
            found.append(problem(node.place, message, "suite list papers"))
    return found


def check_names(run: Node) -> list[Problem]:
    """Names of the task and the probes in a resolved run that the harness does not have."""
    found = []
    task, probes = run.get("task"), run.get("probes")
    if task is not None and isinstance(task.value, str) and task.value not in TASKS:
        found.append(
            problem(task.place, f"task: unknown value (got {shown(task.value)}){offer(task.value, TASKS)}")
        )
    for name, node in (probes.entries if probes else {}).items():
        if name not in PROBES:
            message = f"probes: unknown probe (got {shown(name)}){offer(name, PROBES)}"
            found.append(problem(node.key_place or node.place, message, "suite list probes"))
    return found


def check_measure(claim: Node) -> list[Problem]:
    """A measure that does not exist, or that compares where there is nothing to compare with."""
    # Imported here: the judge's package imports this one for its types.
    from suite.judge.measures import UnknownMeasureError, find_measure

    node, against = claim.get("measure"), claim.get("against")
    if node is None or not isinstance(node.value, str):
        return []
    try:
        measure = find_measure(node.value)
    except UnknownMeasureError as error:
        return [problem(node.place, f"measure: {error}")]
    compares = against is not None and against.value is not None
    if measure.comparison and not compares:
        return [problem(node.place, f"measure: {node.value} compares two sets of runs; `against` is missing")]
    if compares and not measure.comparison:
        name, _, scope = node.value.partition("[")
        forms = " or ".join(f"{name}_{form}" + (f"[{scope}" if scope else "") for form in ("gap", "ratio"))
        better = f"write {forms}, or leave `against` away"
        return [problem(node.place, f"measure: {node.value} is about single runs; {better}")]
    return []


def check_fit(claim: Node) -> list[Problem]:
    """Terms of a fit that are no products of a run's fields, and a fit of what compares two runs."""
    from suite.judge.fits import TermError, read_terms

    node, against = claim.get("fit"), claim.get("against")
    if node is None or node.value is None:
        return []
    if against is not None and against.value is not None:
        return [problem(node.place, "fit: a fit is of single runs; leave `against` away")]
    problems = []
    for item in node.items:
        try:
            read_terms([str(item.value)])
        except TermError as error:
            problems.append(problem(item.place, f"fit: {error}"))
    return problems


def check_excludes(root: Node, sizes: Sequence[Points]) -> list[Problem]:
    """Entries of `exclude` that take no point away at any size."""
    matrix = [labels for found in sizes for labels in (*(arm.labels for arm in found.arms), *found.excluded)]
    problems: list[Problem] = []
    written = root.get("sizes")
    parts = [root, *(written.entries.values() if written else ())]
    for part in parts:
        node = part.get("exclude")
        for entry in node.items if node else []:
            if not matrix or not entry.entries:
                continue
            found = check_labels(entry, matrix, "exclude")
            if not found and not any(matches(labels, entry.plain()) for labels in matrix):
                found = [
                    problem(
                        entry.place, f"exclude: matches no point of the matrix (got {shown(entry.plain())})"
                    )
                ]
            problems += found
    return problems


def check_claims(root: Node, sizes: Sequence[Points]) -> list[Problem]:
    """Claim ids written twice, and selectors that select no run at any size."""
    node = root.get("claims")
    claims = node.items if node else []
    arms = [arm.labels for found in sizes for arm in found.arms]
    problems: list[Problem] = []
    seen: dict[Any, int] = {}
    for claim in claims:
        problems += check_measure(claim) + check_fit(claim)
        claim_id = claim.get("id")
        if claim_id is not None and isinstance(claim_id.value, str):
            if claim_id.value in seen:
                message = (
                    f"claim id {shown(claim_id.value)} is used twice, first on line {seen[claim_id.value]}"
                )
                problems.append(problem(claim_id.place, message))
            seen.setdefault(claim_id.value, claim_id.place.line)
        for side in ("of", "against"):
            selector = claim.get(side)
            if selector is None or not selector.entries or not arms:
                continue
            found = check_labels(selector, arms, side)
            if not found and not any(matches(labels, selector.plain()) for labels in arms):
                message = f"{side}: selects no run of this case at any size (got {shown(selector.plain())})"
                found = [problem(selector.place, message, "suite plan")]
            problems += found
    return problems


def check_labels(selector: Node, arms: list[Labels], side: str) -> list[Problem]:
    """Label names and values that no run has."""
    known: dict[str, dict[Scalar, None]] = {}
    for labels in arms:
        for name, value in labels.items():
            known.setdefault(name, {})[value] = None
    problems = []
    for name, node in selector.entries.items():
        if name not in known:
            message = f"{side}: no run has a label {shown(name)}{offer(name, known)}"
            problems.append(problem(node.key_place or node.place, message))
            continue
        if isinstance(node.value, dict):
            problems.append(
                problem(node.place, f"{side}.{name}: should be a label (got {shown(node.plain())})")
            )
            continue
        for member in node.items if isinstance(node.value, list) else [node]:
            if not any(matches({name: value}, {name: member.plain()}) for value in known[name]):
                allowed = offer(member.plain(), [str(value) for value in known[name]])
                message = f"{side}.{name}: no run has this value (got {shown(member.plain())}){allowed}"
                problems.append(problem(member.place, message))
    return problems
