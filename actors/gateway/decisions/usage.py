"""What the model is told about a tool that it called in a wrong way: which tools there are, and what is wrong."""

import json
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

import jsonschema_rs

from headrace.actors.call_text import SHOWN_CHARS, is_json_text, one_of, shown_value
from headrace.platform.records.message import ToolSpec

_MOST_NAMES = 20


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
    return error.kind.name in ("type", "anyOf", "oneOf") and is_json_text(error.instance)


def _expected(error: jsonschema_rs.ValidationError, details: Mapping[str, Any]) -> str:
    if error.kind.name == "type":
        return f"must be {one_of(details.get('types', []))}"
    if error.kind.name == "enum":
        return f"must be one of {', '.join(map(shown_value, details.get('options', [])[:_MOST_NAMES]))}"
    if error.kind.name in ("anyOf", "oneOf"):
        return "fits none of the forms that it can have"
    # The library's own words begin with the value, which may be long.
    begins = json.dumps(error.instance, ensure_ascii=False, default=str)
    text = error.message.removeprefix(begins).strip()
    return text if len(text) <= 2 * SHOWN_CHARS else f"does not fit its {error.kind.name}"


def _unknown(name: str, place: str, spec: ToolSpec) -> str:
    known = list(spec.parameters.get("properties", {})) if not place else []
    near = get_close_matches(name[:200], known, n=1)
    return f"there is no argument {_within(place, name)[:SHOWN_CHARS]}" + (f", only {near[0]}" if near else "")


def _within(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name
