"""Arguments by what they mean: the paths, commands and URLs of a call, as its tool declares them in `reads`."""

from collections.abc import Iterator, Sequence
from typing import Any

from headrace.actors.gateway.decisions.asked import Asked
from headrace.actors.gateway.decisions.cached import PerObjects
from headrace.platform.errors import ConfigError
from headrace.platform.records.message import ToolSpec

KINDS = ("path", "command", "code", "url", "text")
_MOST_NAMED = 80


def texts(asked: Asked) -> Sequence[tuple[str, str]]:
    """What an argument means, and its text, for each text of a call whose tool says what it means. An argument that is
    left out counts as its default.

    Raises:
        ConfigError: the tool says something that nobody knows.
    """
    if asked.named is not None:
        return asked.named
    given, found = asked.call.arguments, []
    for name, kind, default in _declared.of(asked.spec):
        value = given.get(name, default)
        if isinstance(value, str):
            found.append((kind, value))
        elif value is not None:
            found += [(kind, text) for text in leaves(value)]
    asked.named = tuple(found)
    return asked.named


def leaves(value: Any) -> Iterator[str]:
    """All texts in a value, at any depth, names of fields among them; numbers as they are written."""
    rest = [value]
    while rest:
        value = rest.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            rest += value.values()
            rest += value.keys()
        elif isinstance(value, list | tuple):
            rest += value
        elif value is not None:
            yield str(value)


def _read(spec: ToolSpec) -> tuple[tuple[str, str, Any], ...]:
    properties = spec.parameters.get("properties", {})
    declared = []
    for name, kind in spec.reads.items():
        if kind not in KINDS:
            told = f"the tool {spec.name!r} reads {name!r} as {kind!r:.{_MOST_NAMED}}; write {', '.join(KINDS)}"
            raise ConfigError(told)
        schema = properties.get(name) if isinstance(properties, dict) else None
        declared.append((name, kind, schema.get("default") if isinstance(schema, dict) else None))
    return tuple(declared)


_declared = PerObjects(_read)
