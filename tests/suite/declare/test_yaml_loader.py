"""Plain YAML 1.2 comes in with its places; anything else is refused."""

from __future__ import annotations

import time

import pytest

from suite.declare import CaseError
from suite.declare.yaml_loader import MAX_BYTES, Node, at, parse_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("no", "no"),
        ("on", "on"),
        ("yes", "yes"),
        ("true", True),
        ("False", False),
        ("~", None),
        ("null", None),
        ("1e-3", 1e-3),
        ("1e5", 1e5),
        ("-.5", -0.5),
        ("1.", 1.0),
        ("012", 12),
        ("0o17", 15),
        ("0x1F", 31),
        ("-7", -7),
        ("+7", 7),
        ("1_000", "1_000"),
        ("12:30:45", "12:30:45"),
        ("2024-09-19", "2024-09-19"),
        ("400k", "400k"),
        ("'12'", "12"),
        ('"1e-3"', "1e-3"),
        ("''", ""),
        ("=", "="),
    ],
)
def test_core_types(text: str, value: object) -> None:
    found = parse_yaml(f"a: {text}", "f").plain()["a"]
    assert found == value
    assert type(found) is type(value)


def test_keys_are_text() -> None:
    assert parse_yaml("{no: 1, 2: 3, null: 4, 1e3: 5}", "f").plain() == {"no": 1, "2": 3, "null": 4, "1e3": 5}


def test_places_of_keys_and_values() -> None:
    root = parse_yaml("a: 1\nb:\n  ü: [x, {c: y}]\n", "f")

    def places(*path: str | int) -> tuple[object, ...]:
        node = root.get(*path)
        assert node is not None
        key = node.key_place
        return node.place.line, node.place.column, *((key.line, key.column) if key else ())

    assert places("a") == (1, 4, 1, 1)
    assert places("b") == (3, 3, 2, 1)
    assert places("b", "ü") == (3, 6, 3, 3)
    assert places("b", "ü", 0) == (3, 7)
    assert places("b", "ü", 1, "c") == (3, 14, 3, 11)
    assert root.get("b", "ü", 2) is None
    assert root.get("a", "b") is None


def test_an_alias_stands_for_its_value() -> None:
    assert parse_yaml("a: &x {b: [1]}\nc: *x\nd: [*x]", "f").plain()["d"] == [{"b": [1]}]


def test_a_byte_order_mark_is_no_text() -> None:
    assert parse_yaml("\ufeffa: 1".encode(), "f").plain() == {"a": 1}


def test_every_problem_that_does_not_end_the_parsing_is_told() -> None:
    with pytest.raises(CaseError) as caught:
        parse_yaml("a: !x 1\na: .nan\nb: {c: 1, c: 2}", "f")
    assert [(each.line, each.column) for each in caught.value.problems] == [(1, 4), (2, 1), (2, 4), (3, 11)]


@pytest.mark.parametrize(
    "text",
    [
        "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)),
        "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}]\n" for n in range(1, 99)),
        "[" * 100_000,
        "{a: " * 100_000,
        "- " * 100_000,
        "a: " + "9" * 100_000,
        "x" * (MAX_BYTES + 1),
        "[" + "1," * 400_000 + "]",
    ],
    ids=["laughs", "chain", "lists", "mappings", "dashes", "digits", "bytes", "items"],
)
def test_no_text_stalls_the_loader(text: str) -> None:
    before = time.process_time()
    with pytest.raises(CaseError):
        parse_yaml(text, "f")
    assert time.process_time() - before < 10


def test_a_tree_written_at_one_place() -> None:
    place = parse_yaml("a", "f").place
    tree = at(place, {"a": [1, {"b": None}]})
    assert tree.plain() == {"a": [1, {"b": None}]}
    node = tree.get("a", 1, "b")
    assert isinstance(node, Node) and node.place == place
