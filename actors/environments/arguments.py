"""The `args` that a recipe gives an environment: each part takes what it knows, and nothing is left over."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from headrace.platform.errors import ConfigError

_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def check_args(args: Iterable[str], known: Iterable[str], name: str) -> None:
    """Refuse what is not known. Raises ConfigError that names the nearest."""
    names = list(known)
    for key in args:
        if key not in names:
            near = get_close_matches(key, names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names) or 'none'}"
            raise ConfigError(f"environments.{name}.args has no key {key!r}; {hint}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameters:
    """What a function takes by name: what it must have, what it may have, and whether it takes anything else."""

    required: tuple[str, ...]
    optional: tuple[str, ...]
    takes_all: bool

    @property
    def names(self) -> tuple[str, ...]:
        """Required and optional ones."""
        return self.required + self.optional

    def taken(self, args: Mapping[str, Any], others: "Parameters", name: str) -> dict[str, Any]:
        """Those of `args` that are for this function, where `others` are another's.

        Raises:
            ConfigError: a required one is missing, or one is for neither.
        """
        if not (self.takes_all or others.takes_all):
            check_args(args, dict.fromkeys(self.names + others.names), name)
        if missing := [key for key in self.required if key not in args]:
            raise ConfigError(f"environments.{name}.args lacks {', '.join(missing)}, which {name} needs")
        return {
            key: value
            for key, value in args.items()
            if key in self.names or (self.takes_all and key not in others.names)
        }


NO_PARAMETERS = Parameters(required=(), optional=(), takes_all=False)


def parameters_of(function: Callable[..., Any], skip: int) -> Parameters:
    """The parameters of `function` after the first `skip`."""
    rest = list(inspect.signature(function).parameters.values())[skip:]
    named = [each for each in rest if each.kind in _BY_NAME]
    return Parameters(
        required=tuple(each.name for each in named if each.default is each.empty),
        optional=tuple(each.name for each in named if each.default is not each.empty),
        takes_all=any(each.kind is inspect.Parameter.VAR_KEYWORD for each in rest),
    )
