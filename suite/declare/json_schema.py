"""The JSON Schema of a case file, for editors: completion of keys, preset names and papers while typing.

    suite schema > case.schema.json

Then, as the first line of a case: `# yaml-language-server: $schema=case.schema.json`. Draft 7, the one that
YAML editors support best. It helps typing and is no judge: `load_case` checks much more.
"""

from __future__ import annotations

from typing import Any

from harness.registry import PROBES, TASKS
from harness.spec import RunSpec
from suite.declare.papers import papers
from suite.declare.presets import KINDS, preset_texts
from suite.declare.schema import CaseFile

Schema = dict[str, Any]

_NOT_WRITTEN = ("start_from", "keep_checkpoint", "probes")
"""Fields of a run that are not written among its fields but at the case's top, or set by the plan."""


def case_json_schema() -> Schema:
    """The schema as JSON data, with today's presets, probes and papers as suggestions."""
    schema = CaseFile.model_json_schema()
    run = RunSpec.model_json_schema()
    definitions: Schema = {**run["$defs"], **schema.pop("$defs")}
    run_properties = definitions.pop("RunSpec")["properties"]
    definitions.pop("SizeFile")
    for kind in KINDS.values():
        definition = definitions[kind.spec.__name__]
        definition.pop("required", None)
        definition["properties"] |= {
            "preset": {"type": "string", "description": "Start from this preset."},
            "label": {"type": "string", "description": "What the value is called among an axis' values."},
        }
    fields = _fields(run_properties, definitions)
    fields["task"] = task = {"enum": list(TASKS), "description": "What a run does."}
    closed: Schema = {"type": "object", "additionalProperties": False}
    own = {"start_from": {"description": "null: from scratch", "anyOf": [{"type": "null"}, _ref("Fields")]}}
    refs = {name: _ref(f"Fields/properties/{name}") for name in fields}
    lists = {name: {"type": "array", "items": ref, "minItems": 1} for name, ref in refs.items()}
    either = {name: {"anyOf": [ref, {"type": "array", "items": ref}]} for name, ref in refs.items()}
    properties = schema["properties"]
    shape: Schema = {
        "matrix": {**closed, "properties": lists},
        "include": {"type": "array", "items": {**closed, "properties": {**either, **own}}},
        "exclude": {"type": "array", "items": {"type": "object"}},
    }
    for name, value in shape.items():
        definitions[name.capitalize()] = {**value, "description": properties[name]["description"]}
        properties[name] = _ref(name.capitalize())
    base: Schema = _ref("Fields")
    size: Schema = {**closed, "properties": {**refs, **own, **{name: properties[name] for name in shape}}}
    definitions["Fields"] = {**closed, "description": "Fields of a run.", "properties": fields}
    definitions["Size"] = size
    probes = {**closed, "properties": {name: {"type": "integer", "minimum": 0} for name in PROBES}}
    keys: Schema = {"enum": list(papers())}
    properties |= {
        "paper": {"anyOf": [keys, {"type": "array", "items": keys}]},
        "task": task,
        "base": base,
        "sizes": {"type": "object", "additionalProperties": {"anyOf": [{"type": "null"}, _ref("Size")]}},
        "start_from": {**own["start_from"], "description": properties["start_from"]["description"]},
        "probes": {**probes, "description": properties["probes"]["description"]},
    }
    size["properties"]["probes"] = properties["probes"]
    whole = {"$schema": "http://json-schema.org/draft-07/schema#", **schema, "definitions": definitions}
    found: Schema = _draft7(whole)
    return found


def _ref(name: str) -> Schema:
    return {"$ref": f"#/$defs/{name}"}


def _fields(run_properties: Schema, definitions: Schema) -> Schema:
    """Every field of a run by name, and every nested one by dotted name."""
    fields: Schema = {}
    for name, value in run_properties.items():
        if name in _NOT_WRITTEN:
            continue
        fields[name] = _with_names(name, value)
        target = value.get("$ref") or next((v["$ref"] for v in value.get("anyOf", ()) if "$ref" in v), None)
        if target:
            nested = definitions[target.rsplit("/", 1)[1]]["properties"]
            fields |= {f"{name}.{key}": inner for key, inner in nested.items() if key != "label"}
    return fields


def _with_names(field: str, value: Schema) -> Schema:
    """The field's schema with the names of its presets beside the inline mapping."""
    for name, kind in KINDS.items():
        if kind.field == field:
            names = list(preset_texts(name))
            choices: list[Schema] = [{"enum": [n for n in names if not n.endswith("-K")]}]
            choices += [
                {"type": "string", "pattern": f"^{n[:-2]}-[0-9]+$"} for n in names if n.endswith("-K")
            ]
            return {"description": f"suite list {name}", "anyOf": [*choices, _ref(kind.spec.__name__)]}
    if field == "data":
        return {"description": "A corpus, or where tokens come from.", "anyOf": [{"type": "string"}, value]}
    return value


def _draft7(schema: Any) -> Any:
    """Newer keywords in draft 7's words; numbers may be written as quantities."""
    if isinstance(schema, list):
        return [_draft7(item) for item in schema]
    if not isinstance(schema, dict):
        return schema.replace("#/$defs/", "#/definitions/") if isinstance(schema, str) else schema
    found = {
        key: _draft7(value)
        for key, value in schema.items()
        if not (key == "title" and isinstance(value, str))
    }
    if "prefixItems" in found:
        found["items"] = found.pop("prefixItems")[0]
    if found.get("type") in ("integer", "number"):
        kept = {key: found.pop(key) for key in list(found) if key not in ("description", "default")}
        found["anyOf"] = [kept, {"type": "string", "pattern": "^[0-9.]+ ?[A-Za-z]+$"}]
    return found
