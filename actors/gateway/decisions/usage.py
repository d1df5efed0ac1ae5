"""What the model is told about a tool that it called in a wrong way: how it is called, and what is wrong."""

import json
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

import jsonschema_rs

from headrace.platform.records.message import ToolSpec

_SHOWN_CHARS = 60
_MOST_NAMES = 20


def usage(spec: ToolSpec) -> str:
    """The call in short, such as `add(a: integer, b: integer = 1)`; optional arguments without a default have `?`."""
    properties, required = spec.parameters.get("properties", {}), spec.parameters.get("required", ())
    shown = []
    for name, schema in properties.items():
        given = schema if isinstance(schema, dict) else {}
        sign = "" if name in required or "default" in given else "?"
        default = f" = {shown_value(given['default'])}" if "default" in given else ""
        shown.append(f"{name}{sign}: {_type_name(given, spec.parameters.get('$defs', {}), 0)}{default}")
    return f"{spec.name}({', '.join(shown)})"


def unknown_tool(name: str, known: Iterable[str]) -> str:
    """That there is no such tool, the nearest one, and which there are."""
    names = sorted(known)
    if not names:
        return "there are no tools"
    near = get_close_matches(name[:200], names, n=1)
    listed = ", ".join(names[:_MOST_NAMES]) + (", …" if len(names) > _MOST_NAMES else "")
    meant = f"did you mean {near[0]}? " if near else ""
    return f"there is no tool {shown_value(name)}; {meant}the tools are: {listed}"


def problem(error: jsonschema_rs.ValidationError, spec: ToolSpec) -> str:
    """One thing that is wrong: its place, what was expected, and what came."""
    details = error.kind.as_dict()
    place = ".".join(map(str, error.instance_path))
    if error.kind.name == "required":
        return f"{_within(place, str(details.get('property', '')))} is missing"
    if error.kind.name in ("additionalProperties", "unevaluatedProperties"):
        return "; ".join(_unknown(name, place, spec) for name in details.get("unexpected", [])[:3])
    given = shown_value(error.instance)
    if holds_json(error):
        return f"{place or 'the arguments'}: {given} is JSON in a string; give the object or array itself"
    return f"{place or 'the arguments'}: {_expected(error, details)}, not {given}"


def holds_json(error: jsonschema_rs.ValidationError) -> bool:
    """Whether what is wrong is that an object or array was given as a string (case X1)."""
    value = error.instance
    if error.kind.name not in ("type", "anyOf", "oneOf") or not isinstance(value, str):
        return False
    if not value.lstrip().startswith(("{", "[")):
        return False
    try:
        json.loads(value)
    except (ValueError, RecursionError):
        return False
    return True


def shown_value(value: Any) -> str:
    """A value that the model gave, in short."""
    if isinstance(value, str):
        value = value[: 2 * _SHOWN_CHARS]
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _SHOWN_CHARS else f"{text[: _SHOWN_CHARS - 1]}…"


def _expected(error: jsonschema_rs.ValidationError, details: Mapping[str, Any]) -> str:
    if error.kind.name == "type":
        return f"must be {_one_of(details.get('types', []))}"
    if error.kind.name == "enum":
        return f"must be one of {', '.join(map(shown_value, details.get('options', [])[:_MOST_NAMES]))}"
    if error.kind.name in ("anyOf", "oneOf"):
        return "fits none of the forms that it can have"
    # The library's own words begin with the value, which may be long.
    begins = json.dumps(error.instance, ensure_ascii=False, default=str)
    text = error.message.removeprefix(begins).strip()
    return text if len(text) <= 2 * _SHOWN_CHARS else f"does not fit its {error.kind.name}"


def _unknown(name: str, place: str, spec: ToolSpec) -> str:
    known = list(spec.parameters.get("properties", {})) if not place else []
    near = get_close_matches(name[:200], known, n=1)
    return f"there is no argument {_within(place, name)[:_SHOWN_CHARS]}" + (f", only {near[0]}" if near else "")


def _within(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name


def _type_name(schema: Mapping[str, Any], definitions: Mapping[str, Any], depth: int) -> str:
    if depth > 4:
        return "any"
    if "$ref" in schema:
        target = definitions.get(str(schema["$ref"]).rsplit("/", 1)[-1])
        return _type_name(target, definitions, depth + 1) if isinstance(target, dict) else "any"
    if "enum" in schema or "const" in schema:
        return " or ".join(map(shown_value, schema.get("enum", [schema.get("const")])))
    if isinstance(forms := schema.get("anyOf"), list):
        return " or ".join(_type_name(each, definitions, depth + 1) for each in forms if isinstance(each, dict))
    items = schema.get("items")
    if schema.get("type") == "array" and isinstance(items, dict):
        return f"array of {_type_name(items, definitions, depth + 1)}"
    return _one_of(kind) if isinstance(kind := schema.get("type", "any"), list) else str(kind)


def _one_of(kinds: Iterable[Any]) -> str:
    return " or ".join(map(str, kinds))
