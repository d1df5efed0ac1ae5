"""How a tool is called, and what a model gave it, in words for the model: the same in every answer to a call."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from headrace.platform.records.message import ToolSpec

SHOWN_CHARS = 60
"""How much of a value is shown."""
_DEEPEST = 4


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


def shown_value(value: Any) -> str:
    """A value that the model gave, in short."""
    if isinstance(value, str):
        value = value[: 2 * SHOWN_CHARS]
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= SHOWN_CHARS else f"{text[: SHOWN_CHARS - 1]}…"


def is_json_text(value: Any) -> bool:
    """Whether an object or array was given as a string (case X1)."""
    if not isinstance(value, str) or not value.lstrip().startswith(("{", "[")):
        return False
    try:
        json.loads(value)
    except (ValueError, RecursionError):
        return False
    return True


def one_of(kinds: Iterable[Any]) -> str:
    """Several names as alternatives."""
    return " or ".join(map(str, kinds))


def _type_name(schema: Mapping[str, Any], definitions: Mapping[str, Any], depth: int) -> str:
    if depth > _DEEPEST:
        return "any"
    if "$ref" in schema:
        target = definitions.get(str(schema["$ref"]).rsplit("/", 1)[-1])
        return _type_name(target, definitions, depth + 1) if isinstance(target, dict) else "any"
    if "enum" in schema or "const" in schema:
        return " or ".join(map(shown_value, schema.get("enum", [schema.get("const")])))
    if isinstance(forms := schema.get("anyOf"), list):
        return " or ".join(_type_name(each, definitions, depth + 1) for each in forms if isinstance(each, dict))
    items = schema.get("items")
    if schema.get("type") == "array" and isinstance(items, dict) and items:
        return f"array of {_type_name(items, definitions, depth + 1)}"
    return one_of(kind) if isinstance(kind := schema.get("type", "any"), list) else str(kind)
