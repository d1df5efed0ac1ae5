"""YAML as recipes use it: safe, without duplicate keys, and with `3e-4` as the number that it looks like.

PyYAML keeps the last of two equal keys in silence, so a line of a recipe could be ignored (case V3), and it reads
`3e-4` as text, because YAML 1.1 wants a dot.
"""

import re
from collections.abc import Hashable
from typing import Any

import yaml

from headrace.platform.errors import ConfigError


class _RecipeLoader(yaml.SafeLoader):
    """The safe loader with the two changes above."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    line = key.start_mark.line + 1
                    raise ConfigError(f"line {line}: the key {key.value!r} stands twice in one section; remove one")
                seen.add(key.value)
        return super().construct_mapping(node, deep)


class _RecipeDumper(yaml.SafeDumper):
    """The safe dumper; it quotes text that the loader would read as a number."""


_EXPONENT = re.compile(r"^[-+]?(?:\d+\.?\d*|\.\d+)[eE][-+]?\d+$")
for _side in (_RecipeLoader, _RecipeDumper):
    _side.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+.0123456789"))


def parse_yaml(text: str) -> Any:
    """The value that `text` spells. Raises ConfigError that names the line but quotes nothing: it may be a secret."""
    try:
        return yaml.load(text, Loader=_RecipeLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"line {line}: {error.problem}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"no YAML: {type(error).__name__}") from None


def dump(data: Any) -> str:
    """Plain data as YAML that `parse_yaml` reads back, keys in their order."""
    return yaml.dump(data, Dumper=_RecipeDumper, sort_keys=False, allow_unicode=True, width=120)
