"""Overrides such as `learner.lr=3e-4`, written into a recipe's plain data before it is validated.

Paths are dotted; list items are named by index (`environments.0.weight`) or by their `name`
(`environments.lookup.weight`). `environment.sandbox` means the one environment of a recipe that has one. Values are
YAML. Whether a key exists is left to validation, which knows the models.
"""

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from headrace.platform.config.secret_references import without_password
from headrace.platform.config.yaml_text import parse_yaml
from headrace.platform.errors import ConfigError


def apply_overrides(data: dict[str, Any], overrides: Sequence[str]) -> list[str]:
    """Write each override into `data`, in order. Returns what was wrong with them, one line each."""
    problems: list[str] = []
    for override in overrides:
        try:
            _apply(data, override)
        except ConfigError as error:
            problems.append(str(error))
    return problems


def _apply(data: dict[str, Any], override: str) -> None:
    path, equals, text = override.partition("=")
    segments = path.strip().split(".")
    if not equals or not all(segments):
        raise ConfigError(f"override {without_password(override)!r}: write key=value, such as learner.lr=3e-4")
    segments = _spelled_out(data, segments)
    try:
        value = parse_yaml(text) if text.strip() else ""
    except ConfigError as error:
        raise ConfigError(f"{path}: the value of the override is no YAML ({error})") from None
    node: Any = data
    for depth, segment in enumerate(segments[:-1]):
        node = _descend(node, segment, segments[:depth], segments[depth + 1])
    if isinstance(node, list):
        node[_index(node, segments[-1], segments[:-1])] = value
    elif isinstance(node, dict):
        node[segments[-1]] = value
    else:
        raise ConfigError(f"{path}: {'.'.join(segments[:-1])} is a value, so it has no key {segments[-1]!r}")


def _spelled_out(data: dict[str, Any], segments: list[str]) -> list[str]:
    """`environment.X` as `environments.0.X`."""
    if segments[0] != "environment" or len(segments) == 1:
        return segments
    environments = data.get("environments")
    if not isinstance(environments, list) or len(environments) != 1:
        raise ConfigError(
            f"{'.'.join(segments)}: `environment` means the only one of a recipe; name one as environments.NAME"
        )
    return ["environments", "0", *segments[1:]]


def _descend(node: Any, segment: str, above: list[str], below: str) -> Any:
    """The child of `node` that `segment` names; an absent section is created."""
    here = ".".join([*above, segment])
    if isinstance(node, list):
        return node[_index(node, segment, above)]
    if not isinstance(node, dict):
        raise ConfigError(f"{here}.{below}: {'.'.join(above)} is a value, so it has no key {segment!r}")
    if node.get(segment) is None:
        if _is_position(below):
            raise ConfigError(f"{here}.{below}: the recipe has no list {here}; give all of it, {here}=[…]")
        node[segment] = {}
    return node[segment]


def _is_position(segment: str) -> bool:
    return segment.isascii() and segment.isdecimal()


def _index(items: list[Any], segment: str, above: list[str]) -> int:
    """Where in `items` the item lies that `segment` names by position, by its `name` or `alias`, or, for a name such as
    `./maze.py:Maze`, by the last part of it."""
    where = ".".join(above)
    if _is_position(segment):
        if int(segment) < len(items):
            return int(segment)
        raise ConfigError(f"{where}.{segment}: {where} has {len(items)} items, counted from 0")
    names = [_names(item) for item in items]
    for index, own in enumerate(names):
        if segment in own:
            return index
    known = [own[-1] for own in names if own]
    close = get_close_matches(segment, known, 1, 0)
    hint = f"its items are named {', '.join(known)}; nearest: {close[0]}" if close else "give the position of an item"
    raise ConfigError(f"{where}.{segment}: {where} has no item of that name; {hint}")


def _names(item: Any) -> list[str]:
    """What an item of a list can be called."""
    given = [item.get(key) for key in ("name", "alias")] if isinstance(item, dict) else []
    names = [name for name in given if isinstance(name, str) and name]
    return [name for each in names for name in (each, each.rpartition(":")[2])]
