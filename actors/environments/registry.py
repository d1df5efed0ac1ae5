"""Environments by name: what a recipe's `environments: [{name: …}]` finds."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from headrace.actors.environments.lookup import LookupEnvironment, LookupTasks, demonstrations, tokenizer_files
from headrace.platform.contracts import Environment, Renderer, TaskSource
from headrace.platform.errors import ConfigError, NotFound

Trace = tuple[list[int], list[int]]


@dataclass(kw_only=True, slots=True)
class EnvironmentKind:
    """How one kind of environment is built.

    `environment` and `tasks` take the recipe's `args`, each what it knows; `demonstrations` gives SFT traces and
    `tokenizer_files` the tokenizer of the tiny model, for environments that bring their own.
    """

    environment: Callable[[dict[str, Any]], Environment]
    tasks: Callable[[str, int, dict[str, Any]], TaskSource]
    demonstrations: Callable[[Renderer, int, float, dict[str, Any]], Iterator[Trace]] | None = None
    tokenizer_files: Callable[[], dict[str, bytes]] | None = None


def _take(args: dict[str, Any], known: Sequence[str], all_known: Sequence[str], name: str) -> dict[str, Any]:
    """The entries of `args` named in `known`; anything not in `all_known` is an error that names the nearest."""
    for key in args:
        if key not in all_known:
            near = get_close_matches(key, all_known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(all_known)}"
            raise ConfigError(f"environments.{name}.args has no key {key!r}{hint}")
    return {key: args[key] for key in known if key in args}


_LOOKUP_ARGS = ("hops", "latency_s")


def _lookup_tasks(split: str, seed: int, args: dict[str, Any]) -> LookupTasks:
    return LookupTasks(split, seed, **_take(args, ("hops",), _LOOKUP_ARGS, "lookup"))


def _lookup_traces(renderer: Renderer, seed: int, guess_share: float, args: dict[str, Any]) -> Iterator[Trace]:
    return demonstrations(renderer, _lookup_tasks("train", seed, args), guess_share, seed)


ENVIRONMENTS: dict[str, EnvironmentKind] = {
    "lookup": EnvironmentKind(
        environment=lambda args: LookupEnvironment(**_take(args, ("latency_s",), _LOOKUP_ARGS, "lookup")),
        tasks=_lookup_tasks,
        demonstrations=_lookup_traces,
        tokenizer_files=tokenizer_files,
    ),
}


def environment_kind(name: str) -> EnvironmentKind:
    """The kind registered under `name`.

    Raises:
        NotFound: with the nearest known name.
    """
    if name in ENVIRONMENTS:
        return ENVIRONMENTS[name]
    near = get_close_matches(name, ENVIRONMENTS, n=1)
    raise NotFound(
        f"no environment {name!r}" + (f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(ENVIRONMENTS)}")
    )
