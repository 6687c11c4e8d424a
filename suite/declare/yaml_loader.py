"""Case files as a tree of values that know where they were written.

Only plain data comes in: YAML 1.2's core types (`no` and `on` are text, `1e-3` is a number, `012` is twelve),
no tags, no duplicate keys, one document, and limits on size, depth and aliases, so that no file can stall the
suite. The tree is built from PyYAML's events, which nothing in the file can make run code.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import yaml

from suite.declare.errors import CaseError, Place, Problem, display_path, problem, shown

Scalar = str | int | float | bool | None

MAX_BYTES = 1_000_000
MAX_DEPTH = 32
MAX_NODES = 100_000
"""After aliases are followed: nine lines of nested aliases would otherwise stand for 10^9 values."""

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_NULL = re.compile(r"null|Null|NULL|~|")
_BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_SPECIAL = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


@dataclass(frozen=True, slots=True)
class Node:
    """A value, where it starts, and where its key starts when it has one."""

    value: Scalar | dict[str, Node] | list[Node]
    place: Place
    key_place: Place | None = None

    @property
    def entries(self) -> dict[str, Node]:
        """The mapping's entries; empty when the value is something else."""
        return self.value if isinstance(self.value, dict) else {}

    @property
    def items(self) -> list[Node]:
        """The list's items; empty when the value is something else."""
        return self.value if isinstance(self.value, list) else []

    def get(self, *path: str | int) -> Node | None:
        """The node at `path`, or None."""
        node: Node | None = self
        for step in path:
            if isinstance(step, int):
                node = node.items[step] if node and 0 <= step < len(node.items) else None
            else:
                node = node.entries.get(step) if node else None
        return node

    def plain(self) -> Any:
        """The value alone, as Python data."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.plain() for node in self.value]
        return self.value


def at(place: Place, data: Any, key_place: Place | None = None) -> Node:
    """Python data as a tree that was written at one place (a preset, where its name was written)."""
    if isinstance(data, dict):
        return Node({key: at(place, value, place) for key, value in data.items()}, place, key_place)
    if isinstance(data, list):
        return Node([at(place, value) for value in data], place, key_place)
    return Node(data, place, key_place)


def read_yaml(path: Path) -> Node:
    """The tree of a file. Raises CaseError when it cannot be read or is not plain YAML."""
    file = display_path(path)
    try:
        with path.open("rb") as stream:
            content = stream.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise CaseError([Problem(file, 0, 0, f"cannot be read: {reason}")]) from None
    return parse_yaml(content, file)


def parse_yaml(content: str | bytes, file: str) -> Node:
    """The tree of a YAML text; `file` is what messages call it. Raises CaseError."""
    text = _decode(content, file)
    builder = _Builder(file)
    try:
        for event in yaml.parse(text, Loader=_LOADER):
            builder.feed(event)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = builder.place(mark) if mark else Place(file, 1, 1)
        message = f"not valid YAML: {_reason(error)}"
        raise CaseError([*builder.problems, problem(where, message)]) from None
    except yaml.YAMLError as error:
        raise CaseError([Problem(file, 1, 1, f"not valid YAML: {error}")]) from None
    if builder.root is None and not builder.problems:
        builder.problems.append(Problem(file, 1, 1, "nothing is written here"))
    if builder.problems or builder.root is None:
        raise CaseError(builder.problems)
    return builder.root


def _reason(error: yaml.MarkedYAMLError) -> str:
    """The parser's words, where the unfinished thing began, and what is usually meant."""
    text = " ".join(part for part in (error.context, error.problem) if part)
    begun, noticed = error.context_mark, error.problem_mark
    if begun and noticed and begun.line != noticed.line:
        text += f" (begun on line {begun.line + 1})"
    if "cannot start any token" in text:
        text += "; indent with spaces, and quote text that starts with @, ` or %"
    elif "mapping values are not allowed" in text:
        text += "; quote text that contains a colon and a space"
    return text


def _decode(content: str | bytes, file: str) -> str:
    if len(content) > MAX_BYTES:
        raise CaseError([Problem(file, 1, 1, f"larger than {MAX_BYTES:,} bytes: this is no case file")])
    try:
        text = content if isinstance(content, str) else content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line, column = _position(error.object[: error.start].decode("utf-8", "replace"))
        message = f"not UTF-8 text (byte 0x{error.object[error.start]:02x})"
        raise CaseError([Problem(file, line, column, message)]) from None
    bad = yaml.reader.Reader.NON_PRINTABLE.search(text)
    if bad is not None:
        line, column = _position(text[: bad.start()])
        raise CaseError([Problem(file, line, column, f"unprintable character {bad[0]!a}")])
    return text


def _position(before: str) -> tuple[int, int]:
    """Line and column, from 1, of what follows `before`."""
    return before.count("\n") + 1, len(before) - before.rfind("\n")


@dataclass(slots=True)
class _Open:
    """A mapping or list whose end has not come yet."""

    value: dict[str, Node] | list[Node]
    place: Place
    anchor: str | None
    first_node: int
    key: str | None = None
    key_place: Place | None = None


@dataclass(slots=True)
class _Builder:
    """Turns events into the tree, collecting every problem that does not end the parsing."""

    file: str
    root: Node | None = None
    problems: list[Problem] = field(default_factory=list)
    stack: list[_Open] = field(default_factory=list)
    anchors: dict[str, tuple[Node, int]] = field(default_factory=dict)
    num_nodes: int = 0
    num_documents: int = 0

    def place(self, mark: Any) -> Place:
        return Place(self.file, mark.line + 1, mark.column + 1)

    def stop(self, place: Place, message: str) -> NoReturn:
        raise CaseError([*self.problems, problem(place, message)])

    def feed(self, event: Any) -> None:
        place = self.place(event.start_mark)
        if isinstance(event, yaml.DocumentStartEvent):
            self.num_documents += 1
            if self.num_documents > 1:
                self.stop(place, "a second document; write one document a file")
        elif isinstance(event, yaml.ScalarEvent):
            self._refuse_tag(event, place)
            self._scalar(event, place)
        elif isinstance(event, yaml.AliasEvent):
            self._alias(str(event.anchor), place)
        elif isinstance(event, yaml.MappingStartEvent | yaml.SequenceStartEvent):
            self._refuse_tag(event, place)
            if self._wants_key():
                self.stop(place, "a key must be a plain word, not a list or a mapping")
            if len(self.stack) >= MAX_DEPTH:
                self.stop(place, f"nested deeper than {MAX_DEPTH} levels")
            self._count(1, place)
            empty: dict[str, Node] | list[Node] = {} if isinstance(event, yaml.MappingStartEvent) else []
            self.stack.append(_Open(empty, place, event.anchor, self.num_nodes))
        elif isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
            done = self.stack.pop()
            num_nodes = self.num_nodes - done.first_node + 1
            self._add(Node(done.value, done.place), done.anchor, num_nodes)

    def _refuse_tag(self, event: Any, place: Place) -> None:
        if event.tag is not None:
            tag = str(event.tag).replace("tag:yaml.org,2002:", "!!")
            self.problems.append(
                problem(place, f"tags are not used here (got {shown(tag)}); write plain values")
            )

    def _wants_key(self) -> bool:
        return bool(self.stack) and isinstance(self.stack[-1].value, dict) and self.stack[-1].key is None

    def _count(self, num_nodes: int, place: Place) -> None:
        self.num_nodes += num_nodes
        if self.num_nodes > MAX_NODES:
            self.stop(place, f"more than {MAX_NODES:,} values once aliases are followed")

    def _scalar(self, event: Any, place: Place) -> None:
        self._count(1, place)
        if self._wants_key():
            top = self.stack[-1]
            assert isinstance(top.value, dict)
            earlier = top.value.get(event.value)
            if earlier is not None and earlier.key_place is not None:
                message = (
                    f"duplicate key {shown(event.value)}, first written on line {earlier.key_place.line}"
                )
                self.problems.append(problem(place, message))
            top.key, top.key_place = event.value, place
            if event.anchor:
                self.anchors[event.anchor] = (Node(event.value, place), 1)
            return
        value: Scalar = event.value
        if event.implicit[0]:
            try:
                value = _core_value(event.value)
            except ValueError as error:
                self.problems.append(problem(place, str(error)))
        self._add(Node(value, place), event.anchor, 1)

    def _alias(self, anchor: str, place: Place) -> None:
        if self._wants_key():
            self.stop(place, "a key must be a plain word, not an alias")
        if anchor not in self.anchors:
            self.stop(place, f"alias *{anchor} names no value written above it")
        node, num_nodes = self.anchors[anchor]
        self._count(num_nodes, place)
        if len(self.stack) + _depth(node) > MAX_DEPTH:
            self.stop(place, f"nested deeper than {MAX_DEPTH} levels once aliases are followed")
        self._add(node, None, num_nodes)

    def _add(self, node: Node, anchor: str | None, num_nodes: int) -> None:
        if anchor:
            self.anchors[anchor] = (node, num_nodes)
        if not self.stack:
            self.root = node
            return
        top = self.stack[-1]
        if isinstance(top.value, list):
            top.value.append(node)
        elif top.key is not None:
            top.value[top.key] = replace(node, key_place=top.key_place)
            top.key = None


def _depth(node: Node) -> int:
    children = node.entries.values() if isinstance(node.value, dict) else node.items
    return 1 + max((_depth(child) for child in children), default=0)


def _core_value(text: str) -> Scalar:
    """A plain scalar by YAML 1.2's core schema. Raises ValueError for numbers that no field could hold."""
    if _NULL.fullmatch(text):
        return None
    if _BOOL.fullmatch(text):
        return text.lower() == "true"
    if _INT.fullmatch(text):
        if len(text) > 24:
            raise ValueError(f"number out of range (got {shown(text)})")
        number = int(text[2:], {"0o": 8, "0x": 16}[text[:2]]) if text[:2] in ("0o", "0x") else int(text)
        if not -(2**63) <= number < 2**63:
            raise ValueError(f"number out of range (got {shown(text)})")
        return number
    if _SPECIAL.fullmatch(text):
        raise ValueError(f"not a finite number (got {shown(text)})")
    if _FLOAT.fullmatch(text):
        value = float(text)
        if not math.isfinite(value):
            raise ValueError(f"number out of range (got {shown(text)})")
        return value
    return text
