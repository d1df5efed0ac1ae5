"""Writes docs/configuration.md from the configuration models: one table per section, keys with type, default, meaning.

`python scripts/config_docs.py` rewrites the page; a test compares the page with what this would write.
"""

import re
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from headrace.platform.config import RunConfig
from headrace.platform.config.explain import parts_of

_ANNOTATED = re.compile(r"Annotated\[(\w+), FieldInfo\([^()]*(?:\([^()]*\)[^()]*)*\)\]")
PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"

HEAD = """\
# Configuration

This page is written by `scripts/config_docs.py` from the models in `platform/config/`; a test fails when they differ.

A recipe is a YAML file. `headrace train NAME` takes a shipped recipe by name, or the path of a file (it ends in `.yaml`
or holds a slash). Whatever follows as `key=value` overrides one key:

```
headrace train lookup seed=1 learner.lr=3e-4 environments.lookup.weight=2 'environments.0.args.hops=[2]'
```

- `extends: lookup` starts from another recipe (a name, or a path beside the file). Sections merge key by key; lists
  replace.
- Values of overrides are YAML. Items of a list are named by position, by their `name` or `alias`, or by the last part
  of a name such as `./maze.py:Maze`.
- A path that begins with `./` or `../` is relative to the recipe's file; others, and those in overrides, to the current
  folder.
- Unknown keys, keys that stand twice and wrong values are errors, all listed at once, each with the nearest known key
  or with what was expected. The exit code is 2 and nothing has started.
- Secrets are written as `${env:NAME}` or `${file:PATH}` and read where they are used; the run root keeps the reference.
  A password spelled out in a URL is refused. In a URL's `user:password@` the value is percent-encoded for you.
- The resolved configuration lies in the run root as `config.yaml`; it is itself a recipe.
"""


def render() -> str:
    """The whole page."""
    return HEAD + "".join(_section(model, path) for path, model in _sections(RunConfig, ""))


def _sections(model: type[BaseModel], path: str) -> list[tuple[str, type[BaseModel]]]:
    found = [(path, model)]
    for name, field in model.model_fields.items():
        mark = "[]" if "tuple" in str(field.annotation) else ""
        for part in parts_of(field.annotation):
            found += _sections(part, f"{path}.{name}{mark}".lstrip("."))
    return list(dict.fromkeys(found))  # several kinds of one section may share a part


def _section(model: type[BaseModel], path: str) -> str:
    rows = [_row(path, name, field) for name, field in model.model_fields.items()]
    title = f"`{path}`" if path else "The root"
    for tag in ("kind", "name"):
        field = model.model_fields.get(tag)
        tags = get_args(field.annotation) if field is not None else ()
        if field is not None and tags and (field.is_required() or len(tags) == 1):
            title += f" of {tag} " + " or ".join(f"`{each}`" for each in tags)
    doc = " ".join((model.__doc__ or "").split())
    return f"\n## {title}\n{doc}\n\n| key | type | default | meaning |\n|---|---|---|---|\n" + "".join(rows)


def _row(path: str, name: str, field: FieldInfo) -> str:
    parts = parts_of(field.annotation)
    section = f"{path}.{name}".lstrip(".")
    key = f"`{section}`"
    meaning = " ".join((field.description or "").split())
    if parts:
        meaning = meaning or " ".join((parts[0].__doc__ or "").split())
    cells = (key, _type(field), _default(field, bool(parts)), meaning)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _type(field: FieldInfo) -> str:
    """The type in words, with its bounds."""
    if parts_of(field.annotation):
        text = "list of sections" if "tuple" in str(field.annotation) else "section"
    else:
        text = _plain(field.annotation)
    bounds = [_bound(item) for item in field.metadata]
    return ", ".join([text, *filter(None, bounds)])


def _plain(annotation: Any) -> str:
    text = (
        annotation.__name__ if isinstance(annotation, type) and not hasattr(annotation, "__args__") else str(annotation)
    )
    for name in ("typing.", "collections.abc."):
        text = text.replace(name, "")
    text = _ANNOTATED.sub(r"\1", text)
    if text.startswith("Literal["):
        return text.removeprefix("Literal[").removesuffix("]").replace(", ", " or ").replace("'", "`")
    choices = getattr(annotation, "__members__", None)
    return " or ".join(f"`{member.value}`" for member in choices.values()) if choices else text


def _bound(item: Any) -> str:
    for name, sign in (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<")):
        if hasattr(item, name):
            return f"{sign} {getattr(item, name)}"
    if hasattr(item, "min_length"):
        return f"at least {item.min_length}"
    return f"`{item.pattern}`" if getattr(item, "pattern", None) else ""


def _default(field: FieldInfo, is_section: bool) -> str:
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True, validated_data={})
    if default is None:
        return "none"
    if is_section or default is PydanticUndefined:
        return ""
    if default == "":
        return "empty"
    return f"`{list(default) if isinstance(default, tuple) else default}`"


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
