"""A case at one size as the runs to make: every point of the matrix as a `RunSpec`, shared bases first."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from harness.spec import RunSpec, reads
from suite.declare.checks import check_names
from suite.declare.errors import CaseError, Place, Problem, offer, problem, shown
from suite.declare.feasible import (
    ONE_STEP_STUDIES,
    backend_problem,
    batch_problem,
    fault_problem,
    impossible,
    mesh_problem,
    mixture_problem,
    sequence_problem,
    start_problem,
    study_problem,
)
from suite.declare.labels import matches
from suite.declare.layers import mesh_as_written, resolve, run_spec
from suite.declare.matrix import SIZE_KEYS, Point, points
from suite.declare.overrides import Override, parse_overrides
from suite.declare.yaml_loader import Node, Scalar

if TYPE_CHECKING:
    from suite.declare.case import Case

_SET_BY_PLAN = ("start_from", "keep_checkpoint")
NO_SIZE = "default"
"""What the size of a case without `sizes` is called."""


@dataclass(frozen=True)
class PlannedRun:
    """One run of a plan."""

    key: str
    spec: RunSpec
    labels: dict[str, Scalar]
    """Axis -> name of the value; empty for a base that is no arm itself."""
    role: Literal["arm", "base"]
    depends_on: str | None = None
    """Key of the run whose final weights this one starts from."""


@dataclass(frozen=True)
class Plan:
    """What a case runs at one size: bases before the arms that start from them, no key twice."""

    case: Case
    size: str
    size_reason: str
    runs: tuple[PlannedRun, ...]

    def select(self, where: Mapping[str, Any]) -> list[PlannedRun]:
        """The arms whose labels match; a list value matches any of its members."""
        return [run for run in self.runs if run.role == "arm" and matches(run.labels, where)]


@dataclass
class Built:
    """The runs of a size and what is wrong with them."""

    runs: dict[str, PlannedRun] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    incomplete: bool = False
    """Parts of the case could not be read, so that a missing field means nothing."""
    read: set[str] = field(default_factory=set)
    """Fields that some run reads."""
    left_out: dict[str, Problem] = field(default_factory=dict)
    """Fields that the task of a run does not read, and what to say if no run's does."""


def expand(case: Case, size: str | None = None) -> Plan:
    """The plan of a case at a size. Raises CaseError when the size is unknown.

    Without a size: `gpu` when an NVIDIA device is visible and the case has it, else `laptop`, else its first.
    """
    sizes = list(case.sizes)
    if size is not None and size not in (sizes or [NO_SIZE]):
        message = f"unknown size (got {shown(size)}){offer(size, sizes or [NO_SIZE])}"
        raise CaseError([Problem(f"--size {size}", 0, 0, message)])
    chosen, reason = (size, "asked for") if size is not None else default_size(sizes)
    built = build(case.root, chosen if sizes else None, parse_overrides(case.overrides)[0])
    if built.problems:
        raise CaseError(built.problems)
    bases = {run.depends_on for run in built.runs.values()}
    ordered = sorted(built.runs.values(), key=lambda run: run.key not in bases)
    return Plan(case, chosen, reason, tuple(ordered))


def default_size(sizes: list[str]) -> tuple[str, str]:
    """The size that suits this machine, and why."""
    if not sizes:
        return NO_SIZE, "the case has one size only"
    if nvidia_visible():
        machine, wanted = "an NVIDIA device is visible", "gpu"
    else:
        machine, wanted = "no NVIDIA device is visible", "laptop"
    if wanted in sizes:
        return wanted, machine
    other = "laptop" if "laptop" in sizes else sizes[0]
    return other, f"{machine}, and the case has no size {wanted}"


def nvidia_visible() -> bool:
    """True when a process started now would see an NVIDIA device, by the kernel's device files."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and hidden.strip() in ("", "-1", "NoDevFiles"):
        return False
    return any(Path("/dev").glob("nvidia[0-9]*"))


def build(
    root: Node, size_name: str | None, overrides: Sequence[Override], incomplete: bool = False
) -> Built:
    """The runs of a case's tree at a size. Everything that is wrong is collected, nothing raised."""
    built = Built(incomplete=incomplete)
    size = root.get("sizes", size_name) if size_name is not None else None
    found = points(root, size, overrides)
    built.problems += found.problems
    below = _case_layers(root, size)
    above = [override.layer() for override in found.overrides]
    base_above = [override.layer() for override in found.base_overrides]
    bases: dict[int, RunSpec | None] = {}
    for point in found.arms:
        spec = _spec([*below, point.fields, *above], point.fields.place, built)
        if spec is not None and point.start_from is not None and not reads(spec.task, "start_from"):
            message = f"start_from: nothing that task {spec.task} reads"
            built.left_out.setdefault("start_from", problem(point.start_from.place, message))
            point = replace(point, start_from=None)
        base: RunSpec | None = None
        if point.start_from is not None:
            built.read.add("start_from")
            if id(point.start_from) not in bases:
                layers = [*below, *above, point.start_from, *base_above]
                bases[id(point.start_from)] = _spec(layers, point.start_from.place, built)
            base = bases[id(point.start_from)]
        if spec is None or (base is None and point.start_from is not None):
            continue
        if base is not None and point.start_from is not None and (misfit := start_problem(spec, base)):
            message = f"start_from: the base's weights do not fit every run: {misfit}"
            built.problems.append(problem(point.start_from.place, message))
            continue
        _add(built, spec, base, point)
    return built


def _add(built: Built, spec: RunSpec, base: RunSpec | None, point: Point) -> None:
    """Add an arm and the base it stands on. A base that is an arm as well keeps its labels; a case's plain run that
    `include` writes once more gets those of the entry."""
    depends_on = None
    if base is not None:
        spec = spec.model_copy(update={"start_from": base})
        depends_on = base.key
        kept = base.model_copy(update={"keep_checkpoint": True})
        known = built.runs.get(depends_on)
        built.runs[depends_on] = (
            PlannedRun(depends_on, kept, {}, "base") if known is None else replace(known, spec=kept)
        )
    key = spec.key
    known = built.runs.get(key)
    if known is None:
        built.runs[key] = PlannedRun(key, spec, point.labels, "arm", depends_on)
    elif known.role == "base" or not known.labels:
        built.runs[key] = replace(known, labels=point.labels, role="arm")


def _case_layers(root: Node, size: Node | None) -> list[Node]:
    """What every run of a size is written over: the case's own keys, `base`, the size."""
    own = {key: node for key in ("task", "probes") if (node := root.get(key)) is not None}
    layers = [Node(own, root.place)]
    base = root.get("base")
    if base is not None:
        layers.append(base)
    if size is not None:
        layers.append(Node({k: n for k, n in size.entries.items() if k not in SIZE_KEYS}, size.place))
    return layers


def _spec(layers: list[Node], place: Place, built: Built) -> RunSpec | None:
    whole, wrong = resolve(layers, place)
    problems = [each for found in wrong.values() for each in found]
    for key in _SET_BY_PLAN:
        node = whole.entries.pop(key, None)
        if node is not None:
            message = f"{key} is set by the plan; write start_from at the top of the case, a size or include"
            problems.append(problem(node.key_place or node.place, message))
    problems += check_names(whole)
    built.problems += problems
    whole = _only_what_is_read(whole, built)
    try:
        spec = run_spec(whole, ("*",) if built.incomplete else tuple(wrong))
    except CaseError as error:
        built.problems += _with_nearest(whole, error.problems)
        return None
    if not spec.is_training:
        lacking = None if problems or built.incomplete else study_problem(spec)
        if lacking is not None:
            field, message = lacking
            built.problems.append(problem((whole.get(field) or whole).place, message))
            return None
        if spec.task not in (*ONE_STEP_STUDIES, "pipeline"):
            return None if problems else spec
    found = []
    if misfit := mesh_problem(spec):
        mesh = whole.get("parallelism") or whole
        found.append(problem(mesh.place, misfit, "suite list parallelisms"))
    checks = (
        ("seq_len", sequence_problem(spec) if spec.task != "pipeline" else None, ""),
        ("accumulation", batch_problem(spec), ""),
        ("fault", fault_problem(spec), ""),
        ("precision", backend_problem(spec), "suite list precisions"),
        ("model", mixture_problem(spec), "suite list models"),
    )
    for key, told, see in checks:
        if told:
            found.append(problem((whole.get(key) or whole).place, told, see))
    built.problems += found
    return None if problems or found else spec


def _with_nearest(whole: Node, problems: list[Problem]) -> list[Problem]:
    """The problems; where all that is wrong is a mesh that contradicts itself, with the nearest possible one."""
    mesh = whole.get("parallelism")
    start = "parallelism: "
    if mesh is None or not all(each.message.startswith(start) for each in problems):
        return problems
    others = Node({key: node for key, node in whole.entries.items() if key != "parallelism"}, whole.place)
    if any(mesh.place != Place(each.file, each.line, each.column) for each in problems):
        return problems  # a single field of it is wrong, and that is said
    spec = run_spec(others).model_copy(update={"parallelism": mesh_as_written(mesh)})
    message = impossible(spec, [each.message.removeprefix(start) for each in problems])
    return [problem(mesh.place, message, "suite list parallelisms")]


def _only_what_is_read(whole: Node, built: Built) -> Node:
    """The fields that the run's task reads: runs of several tasks may share a `base`."""
    node = whole.get("task")
    task = node.value if node is not None else RunSpec.model_fields["task"].default
    if not isinstance(task, str):
        return whole
    kept = {}
    for key, child in whole.entries.items():
        if key not in RunSpec.model_fields or reads(task, key):
            built.read.add(key)
            kept[key] = child
        else:
            found = problem(child.key_place or child.place, f"{key}: nothing that task {task} reads")
            built.left_out.setdefault(key, found)
    return Node(kept, whole.place, whole.key_place)


def unread_fields(sizes: Sequence[Built]) -> list[Problem]:
    """Fields of a case that no run at any size reads."""
    read = {key for built in sizes for key in built.read}
    return [told for built in sizes for key, told in built.left_out.items() if key not in read]
