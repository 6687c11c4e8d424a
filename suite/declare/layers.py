"""From written layers to a `RunSpec`: defaults < preset < base < size < matrix point < `--set`.

Each layer is a mapping over the run's fields, keys dotted where nested. For model, precision, optimizer,
parallelism and ageing a later name replaces an earlier one, together with what stood in the same mapping as
the earlier name; fields written on their own (`model.ffn: gelu`, `optimizer: {lr: 3e-3}`) stay, whatever the
name.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel, ValidationError

from harness.spec import ParallelismSpec, RunSpec
from harness.spec.tasks import NEEDED_FOR_TRAINING, TRAINING_TASKS
from suite.declare.errors import CaseError, Place, Problem, offer, problem, shown
from suite.declare.messages import problems_of, unwrap
from suite.declare.presets import KIND_OF_FIELD, preset_node, preset_texts
from suite.declare.quantities import parse_quantity
from suite.declare.yaml_loader import Node


def merge(below: Node | None, above: Node) -> Node:
    """`above` written over `below`: mappings key by key, everything else replaced."""
    if below is None or not isinstance(below.value, dict) or not isinstance(above.value, dict):
        return above
    merged = dict(below.value)
    for key, node in above.value.items():
        merged[key] = merge(merged.get(key), node)
    return Node(merged, above.place, above.key_place)


def nest(key: str, node: Node) -> Node:
    """`a.b.c: node` as nested mappings, written where the dotted key was."""
    for step in reversed(key.split(".")):
        node = Node({step: node}, node.place, node.key_place)
    return node


def undot(node: Node) -> Node:
    """A mapping with dotted keys nested; any other value as it is."""
    if not isinstance(node.value, dict):
        return node
    whole: Node = Node({}, node.place, node.key_place)
    for key, child in node.entries.items():
        whole = merge(whole, nest(key, child))
    return Node(whole.value, node.place, node.key_place)


@dataclass
class _Choice:
    """What was written for one field that takes presets."""

    chosen: Node | None = None
    """The mapping of the last preset or inline definition."""
    overrides: Node | None = None
    """Fields written on their own."""

    def write(self, field: str, node: Node) -> None:
        if isinstance(node.value, str):
            self.chosen = replace(preset_node(field, node.value, node.place), key_place=node.key_place)
            return
        if not isinstance(node.value, dict):
            kind = KIND_OF_FIELD[field]
            what = f"{field}: should be the name of a preset, or a mapping (got {shown(node.plain())})"
            raise CaseError([problem(node.place, what + offer("", preset_texts(kind)), f"suite list {kind}")])
        own = undot(node)
        name = own.entries.get("preset")
        if name is None and "name" not in own.entries:
            if field == "parallelism":
                # The mesh is no longer the one that the preset's name stands for.
                own = merge(Node({"name": Node("custom", own.place)}, own.place), own)
            self.override(own)
            return
        self.chosen = None
        if name is not None:
            if not isinstance(name.value, str):
                raise CaseError(
                    [problem(name.place, f"preset: should be a name (got {shown(name.plain())})")]
                )
            self.chosen = preset_node(field, name.value, name.place)
        rest = {key: child for key, child in own.entries.items() if key != "preset"}
        written = Node(rest, node.place, node.key_place)
        self.chosen = merge(self.chosen, written)
        if self.overrides is not None:
            self.overrides = _without(self.overrides, written)

    def override(self, node: Node) -> None:
        self.overrides = merge(self.overrides, node)

    def result(self) -> Node | None:
        if self.overrides is None:
            return self.chosen
        return merge(self.chosen, self.overrides)


def _without(node: Node, written: Node) -> Node:
    """`node` without the leaves that `written`, the later of the two, gives."""
    kept = {}
    for key, child in node.entries.items():
        other = written.entries.get(key)
        if other is None:
            kept[key] = child
        elif isinstance(child.value, dict) and isinstance(other.value, dict):
            kept[key] = _without(child, other)
    return Node(kept, node.place, node.key_place)


def resolve(layers: Iterable[Node], root: Place) -> tuple[Node, dict[str, list[Problem]]]:
    """One mapping of the run's fields, presets filled in, and by field what was wrong with the names."""
    whole = Node({}, root)
    choices: dict[str, _Choice] = {}
    problems: dict[str, list[Problem]] = {}
    for layer in layers:
        for key, node in layer.entries.items():
            head, _, rest = key.partition(".")
            if head in KIND_OF_FIELD:
                try:
                    choice = choices.setdefault(head, _Choice())
                    if rest and rest != "preset":
                        choice.override(nest(rest, undot(node)))
                    else:
                        choice.write(head, nest(rest, node) if rest else node)
                except CaseError as error:
                    problems.setdefault(head, []).extend(error.problems)
            elif key == "data" and isinstance(node.value, str):
                whole = merge(whole, nest("data.corpus", node))
            else:
                whole = merge(whole, nest(key, undot(node)))
    for head, choice in choices.items():
        result = choice.result()
        if result is not None:
            whole = merge(whole, nest(head, result))
    return Node(whole.value, root), problems


def run_spec(whole: Node, unread: Collection[str] = ()) -> RunSpec:
    """The validated spec. Raises CaseError with every field that is wrong, each where it was written.

    Fields in `unread` were written, wrongly, and are not called missing; "*" stands for any.
    """
    task = whole.get("task")
    is_training = (RunSpec.model_fields["task"].default if task is None else task.value) in TRAINING_TASKS
    needed = NEEDED_FOR_TRAINING if is_training else ()
    try:
        text = json.dumps(_numbers(whole, RunSpec))
        return RunSpec.model_validate_json(text, strict=True)
    except ValidationError as error:
        tokens = whole.get("tokens")
        if is_training and tokens is not None and number(tokens.value, (int,)) == 0:
            message = f"tokens: must be at least 1 (got {shown(tokens.plain())})"
            raise CaseError([problem(tokens.place, message, "suite schema")]) from None
        problems = problems_of(error, whole, RunSpec, "suite schema", unread, needed)
        raise CaseError(problems) from None


def mesh_as_written(node: Node) -> ParallelismSpec:
    """The mesh that the fields say, unchecked: they may contradict each other."""
    return ParallelismSpec.model_construct(**_numbers(node, ParallelismSpec))


def _numbers(node: Node, annotation: Any) -> Any:
    """Plain data, with quantities as numbers and whole floats (1e5) as ints where the field is a number."""
    kinds = unwrap(annotation) if annotation is not None else ()
    if isinstance(node.value, dict):
        model = next((k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)), None)
        fields = model.model_fields if model else {}
        inner = {key: fields[key].annotation for key in fields}
        values = next((k.__args__[1] for k in kinds if getattr(k, "__origin__", None) is dict), None)
        return {key: _numbers(child, inner.get(key, values)) for key, child in node.value.items()}
    if isinstance(node.value, list):
        return [_numbers(child, None) for child in node.value]
    return number(node.value, kinds)


def number(value: Any, kinds: Sequence[Any]) -> Any:
    """`value` as the number it stands for when the field holds one; else unchanged."""
    if int not in kinds and float not in kinds:
        return value
    if isinstance(value, str):
        quantity = parse_quantity(value)
        value = value if quantity is None else quantity
    if int in kinds and float not in kinds and isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) < 2**63 else value
    return value
