"""Turns what pydantic found wrong into lines that name the key, the value, what was expected, and the nearest key.

`keys_of` walks the models, so that it knows every key that a recipe may hold; `scripts/config_docs.py` walks the same.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from headrace.platform.config.secret_references import without_password

Model = type[BaseModel]

_QUOTED = re.compile("'([^']*)'")
_FILE_KEYS = {1: {"extends"}}  # what a recipe file may hold at its top beside the models' keys; load.py takes it out


def problems(error: ValidationError, root: Model, data: Mapping[str, Any]) -> list[str]:
    """One line per error, with the full dotted path (case V3)."""
    return [_line(detail, root, data) for detail in _true_errors(error.errors(include_url=False))]


def parts_of(annotation: Any) -> list[Model]:
    """The configuration models that an annotation holds, through unions and sequences."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in parts_of(argument)]


def keys_of(model: Model, prefix: str = "") -> Iterator[str]:
    """All dotted keys below `model`; a list item is written `[]`: `environments[].weight`."""
    for name, field in model.model_fields.items():
        key = f"{prefix}{name}"
        yield key
        parts = parts_of(field.annotation)
        mark = "[]" if "tuple" in str(field.annotation) or "list" in str(field.annotation) else ""
        for part in parts:
            yield from keys_of(part, f"{key}{mark}.")


def _true_errors(details: Sequence[ErrorDetails]) -> list[ErrorDetails]:
    """Without those that only follow from others: a list whose items are wrong is not too short besides."""
    return [
        detail
        for detail in details
        if detail["type"] != "too_short" or len(detail["input"]) < detail.get("ctx", {})["min_length"]
    ]


def _line(detail: ErrorDetails, root: Model, data: Mapping[str, Any]) -> str:
    path, models = _locate(detail["loc"], root, data, names_a_key=detail["type"] in ("missing", "extra_forbidden"))
    dotted = ".".join(path)
    if detail["type"] == "extra_forbidden":
        return f"{dotted}: unknown key; {_nearest(path, models, root)}"
    if detail["type"] == "missing":
        return f"{dotted}: required, but missing"
    if detail["type"] in ("union_tag_invalid", "union_tag_not_found"):
        return _wrong_tag(detail, path, models)
    if detail["type"] in ("model_attributes_type", "model_type"):  # pydantic's word for it names classes
        return f"{dotted}: expected a section; got {_shown(detail['input'])}"
    message = detail["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    if detail["type"] in ("value_error", "assertion_error"):
        return f"{dotted}: {message}" if dotted else message
    expected = message.replace("Input should be", "expected").replace("Input should", "it should")
    hint = _meant(detail["input"], _QUOTED.findall(detail.get("ctx", {}).get("expected", "")))
    return f"{dotted}: {expected}; got {_shown(detail['input'])}{hint}"


def _wrong_tag(detail: ErrorDetails, path: Sequence[str], models: Sequence[Model]) -> str:
    """The line about the key, such as `kind`, that says which of several sections this is."""
    tag = detail["ctx"]["discriminator"].strip("'")
    here = [
        part for model in models if (field := model.model_fields.get(path[-1])) for part in parts_of(field.annotation)
    ]
    fields = [field for model in here or models if (field := model.model_fields.get(tag))]
    known = [value for field in fields for value in get_args(field.annotation)]
    expected = " or ".join(filter(None, (", ".join(map(repr, known[:-1])), repr(known[-1]))))
    key = ".".join([*path, tag])
    if detail["type"] == "union_tag_not_found":
        return f"{key}: required, but missing; expected {expected}"
    given = detail["input"][tag]
    return f"{key}: expected {expected}; got {_shown(given)}{_meant(given, known)}"


def _meant(given: Any, known: Sequence[str]) -> str:
    """A hint at the value that was meant, where one of the known ones is near."""
    close = get_close_matches(given, known, 1, 0.6) if isinstance(given, str) else []
    return f"; did you mean {close[0]}?" if close else ""


def _locate(loc: Sequence[int | str], root: Model, data: Any, *, names_a_key: bool) -> tuple[list[str], list[Model]]:
    """The path as the recipe spells it, without pydantic's union tags, and the models that hold its last key.

    `names_a_key`: the last element is a key that is not there, or not known; else one that is not there is a tag.
    """
    path: list[str] = []
    node: Any = data
    models: list[Model] = [root]
    for depth, element in enumerate(loc):
        last = depth == len(loc) - 1
        if isinstance(node, dict) and (element in node or (last and names_a_key)):
            path.append(str(element))
            node = node.get(element)
            if not last:
                fields = [model.model_fields.get(str(element)) for model in models]
                models = [part for field in fields if field for part in _chosen(field, node)]
        elif isinstance(node, list | tuple) and isinstance(element, int):
            path.append(str(element))
            node = node[element] if element < len(node) else None
    return path, models


def _chosen(field: FieldInfo, node: Any) -> list[Model]:
    """The models that `field` holds; of several that a key tells apart, the one that the recipe's section names."""
    parts, tag = parts_of(field.annotation), field.discriminator
    if not isinstance(tag, str) or not isinstance(node, dict):
        return parts
    return [part for part in parts if node.get(tag) in _tags(part, tag)] or parts


def _tags(part: Model, tag: str) -> tuple[str, ...]:
    """The values of `tag` that say that a section is a `part`."""
    return get_args(part.model_fields[tag].annotation)


def _owners(path: Sequence[str], root: Model) -> list[str]:
    """Where a section may be one of several: those that have the key, as `name: ppo`."""
    models: list[Model] = [root]
    tags: list[str] = []
    for element in path[:-1]:
        fields = [field for model in models if (field := model.model_fields.get(element))]
        models = [part for field in fields for part in parts_of(field.annotation)] or models
        tags = [field.discriminator for field in fields if isinstance(field.discriminator, str)]
    owners = [model for model in models if path[-1] in model.model_fields]
    return [f"{tag}: {value}" for tag in tags[:1] for model in owners for value in _tags(model, tag)]


def _nearest(path: Sequence[str], models: Sequence[Model], root: Model) -> str:
    """The known key that was meant, most likely: in the same section, else of that name elsewhere."""
    key = path[-1]
    section = "".join(f"{part}." for part in path[:-1])
    if len(path) > 1 and (owners := _owners(path, root)):
        return f"it is an option of {' or '.join(owners)}"
    here = sorted({name for model in models for name in model.model_fields} | _FILE_KEYS.get(len(path), set()))
    if close := get_close_matches(key, here, 1, 0.6):
        return f"did you mean {section}{close[0]}?"
    elsewhere = list(dict.fromkeys(known for known in keys_of(root) if known.rpartition(".")[2] == key))
    if elsewhere:
        return f"did you mean {' or '.join(elsewhere)}?"
    every = {known.rpartition(".")[2]: known for known in keys_of(root)}
    if close := get_close_matches(key, every, 1, 0.75):
        return f"did you mean {every[close[0]]}?"
    nearest = get_close_matches(key, here, 1, 0)
    named = f"; nearest: {section}{nearest[0]}" if nearest else ""
    return f"known here: {', '.join(here)}{named}"


def _shown(value: Any) -> str:
    """A value short enough for a message; sections and lists are described, and URLs lose their passwords."""
    if isinstance(value, dict):
        return "a section"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    text = repr(without_password(value) if isinstance(value, str) else value)
    return text if len(text) <= 80 else f"{text[:77]}…"
