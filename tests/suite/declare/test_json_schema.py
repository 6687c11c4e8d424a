"""The schema for editors: draft 7, with today's names, and every key of the built-in cases in it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from suite.declare import papers, presets
from suite.declare.json_schema import case_json_schema
from suite.declare.schema import CaseFile
from suite.declare.yaml_loader import read_yaml
from suite.paths import cases_dir


def keywords(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        for key, value in schema.items():
            yield key
            yield from keywords(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from keywords(value)


def test_it_is_draft_7_with_definitions() -> None:
    schema = case_json_schema()
    text = json.dumps(schema)
    assert schema["$schema"] == "http://json-schema.org/draft-07/schema#"
    assert set(schema["properties"]) == set(CaseFile.model_fields)
    assert set(schema["definitions"]) >= {"Claim", "Expect", "PaperSays", "Fields", "Size", "ModelSpec"}
    assert not {"$defs", "prefixItems", "unevaluatedProperties"} & set(keywords(schema))
    assert len(text) < 130_000


def test_every_reference_leads_somewhere() -> None:
    schema = case_json_schema()
    references = []

    def check(part: Any) -> None:
        if isinstance(part, dict):
            for key, value in part.items():
                if key == "$ref":
                    references.append(value)
                    target: Any = schema
                    for step in value.removeprefix("#/").split("/"):
                        target = target[step]
                check(value)
        elif isinstance(part, list):
            for value in part:
                check(value)

    check(schema)
    assert references


def test_names_are_offered() -> None:
    schema = case_json_schema()
    fields = schema["definitions"]["Fields"]["properties"]
    assert fields["model"]["anyOf"][0]["enum"] == list(presets("models"))
    assert "fp8-delayed" in fields["precision"]["anyOf"][0]["enum"]
    assert {"type": "string", "pattern": "^static-[0-9]+$"} in fields["ageing"]["anyOf"]
    assert fields["optimizer.lr"]["anyOf"][0] == {"exclusiveMinimum": 0, "type": "number"}
    assert schema["properties"]["paper"]["anyOf"][0]["enum"] == list(papers())
    assert "loss" in schema["properties"]["probes"]["properties"]
    assert "start_from" not in fields and "keep_checkpoint" not in fields


def test_the_built_in_cases_use_keys_that_it_knows() -> None:
    schema = case_json_schema()
    fields = set(schema["definitions"]["Fields"]["properties"])
    size = set(schema["definitions"]["Size"]["properties"])
    for path in cases_dir().glob("*.yaml"):
        root = read_yaml(path)
        if "question" not in root.entries:
            continue
        case = root.plain()
        assert set(case) <= set(schema["properties"])
        assert set(case.get("base", {})) <= fields
        assert set(case.get("matrix", {})) <= fields
        for entry in case.get("sizes", {}).values():
            assert set(entry or {}) <= size
        for entry in case.get("include", []):
            assert set(entry) <= fields | {"start_from"}
