"""Environments by name: what a recipe's `environments: [{name: …}]` finds.

A name is one of headrace's own, an object in a file or module (`./file.py:Name`), `reasoning_gym:NAME`, or an entry
point `headrace.environments` of an installed package. Nothing is loaded before its name is asked for.
"""

import dataclasses
import inspect
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from headrace.actors.environments.arguments import check_args
from headrace.actors.environments.guess import GuessEnvironment, GuessTasks
from headrace.actors.environments.kind import Door, EnvironmentKind, Origin, Trace
from headrace.actors.environments.lookup import LookupEnvironment, LookupTasks, demonstrations, tokenizer_files
from headrace.actors.environments.lookup.injected import NAME as INJECTED
from headrace.actors.environments.lookup.injected import InjectedLookup, InjectedLookupTasks, checked_share
from headrace.actors.environments.lookup.injected_demonstrator import injected_demonstrations
from headrace.actors.environments.lookup.injected_vocabulary import injected_tokenizer_files
from headrace.actors.environments.lookup.sandboxed import SandboxedLookup
from headrace.actors.frames import described
from headrace.actors.targets import is_target, load_file, load_target, target_digest
from headrace.platform.contracts import Renderer
from headrace.platform.errors import ConfigError, HeadraceError, NotFound

__all__ = ["ENTRY_POINTS", "ENVIRONMENTS", "EnvironmentKind", "environment_kind"]

ENTRY_POINTS = "headrace.environments"
"""The group of entry points under which an installed package offers environments."""

_GYM = "reasoning_gym:"
_OPENENV = "openenv"
_HARNESS = "harness"
_LOOKUP_ARGS = ("hops", "latency_s")
_INJECTED_ARGS = (*_LOOKUP_ARGS, "injected", "obeys")


def _take(args: dict[str, Any], known: Sequence[str], all_known: Sequence[str], name: str) -> dict[str, Any]:
    """The entries of `args` named in `known`; anything not in `all_known` is an error that names the nearest."""
    check_args(args, all_known, name)
    return {key: args[key] for key in known if key in args}


def _lookup_tasks(split: str, seed: int, args: dict[str, Any]) -> LookupTasks:
    return LookupTasks(split, seed, **_take(args, ("hops",), _LOOKUP_ARGS, "lookup"))


def _lookup_traces(renderer: Renderer, seed: int, guess_share: float, args: dict[str, Any]) -> Iterator[Trace]:
    return demonstrations(renderer, _lookup_tasks("train", seed, args), guess_share, seed)


def _sandboxed_lookup(args: dict[str, Any]) -> SandboxedLookup:
    return SandboxedLookup(**_take(args, ("latency_s",), _LOOKUP_ARGS, "lookup"))


def _injected_tasks(split: str, seed: int, args: dict[str, Any]) -> InjectedLookupTasks:
    return InjectedLookupTasks(split, seed, **_take(args, ("hops", "injected"), _INJECTED_ARGS, INJECTED))


def _injected_traces(renderer: Renderer, seed: int, guess_share: float, args: dict[str, Any]) -> Iterator[Trace]:
    obeys = checked_share("obeys", args.get("obeys", 0.5))
    return injected_demonstrations(renderer, _injected_tasks("train", seed, args), guess_share, obeys, seed)


ENVIRONMENTS: dict[str, EnvironmentKind] = {
    "lookup": EnvironmentKind(
        environment=lambda args: LookupEnvironment(**_take(args, ("latency_s",), _LOOKUP_ARGS, "lookup")),
        sandboxed=_sandboxed_lookup,
        tasks=_lookup_tasks,
        demonstrations=_lookup_traces,
        tokenizer_files=tokenizer_files,
        environment_args=("latency_s",),
    ),
    "guess": EnvironmentKind(
        environment=lambda args: GuessEnvironment(**_take(args, ("turns",), ("turns",), "guess")),
        tasks=lambda split, seed, args: GuessTasks(split, seed),
    ),
    INJECTED: EnvironmentKind(
        environment=lambda args: InjectedLookup(**_take(args, ("latency_s",), _INJECTED_ARGS, INJECTED)),
        tasks=_injected_tasks,
        demonstrations=_injected_traces,
        tokenizer_files=injected_tokenizer_files,
        environment_args=("latency_s",),
    ),
}


def environment_kind(name: str) -> EnvironmentKind:
    """The kind that `name` stands for.

    Raises:
        NotFound: with the nearest known name.
        ConfigError: it cannot be loaded, or is no environment; names the user's file and line.
    """
    if name in ENVIRONMENTS:
        return ENVIRONMENTS[name]
    if name == _OPENENV:
        from headrace.actors.remote.openenv_kind import OPENENV

        return OPENENV
    if name == _HARNESS:
        from headrace.actors.harness.environment import HARNESS_KIND

        return HARNESS_KIND
    if name.startswith(_GYM):
        from headrace.actors.tasks.reasoning_gym import reasoning_gym_kind

        return reasoning_gym_kind(name.removeprefix(_GYM))
    if is_target(name):
        return _target_kind(name)
    offered = entry_points(group=ENTRY_POINTS)
    if found := [each for each in offered if each.name == name]:
        return _entry_point_kind(name, found)
    if name.endswith(".py"):
        raise NotFound(f"{name!r} names a file; say which object in it is the environment: {_objects_in(name)}")
    known = [*ENVIRONMENTS, _OPENENV, _HARNESS, *offered.names]
    near = get_close_matches(name, known, n=1)
    raise NotFound(
        f"no environment {name!r}; " + (f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}")
    )


def _objects_in(name: str) -> str:
    """The targets in a file that could be meant, for a message. Raises ConfigError."""
    module = load_file(Path(name).expanduser().resolve())
    found = [
        f"{name}:{attribute}"
        for attribute, value in vars(module).items()
        if isinstance(value, EnvironmentKind)
        or (inspect.isclass(value) and value.__module__ == module.__name__ and _plays(value))
        or (not inspect.isclass(value) and isinstance(value, Door))
    ]
    return " or ".join(found) or f"{name}:NAME (it holds none)"


def _plays(cls: type) -> bool:
    return any(callable(getattr(cls, method, None)) for method in ("step", "_step"))


def _target_kind(target: str) -> EnvironmentKind:
    """What a user's object stands for. Raises ConfigError."""
    value, origin = load_target(target)
    if isinstance(value, EnvironmentKind):
        kind = value
    elif inspect.isclass(value):
        from headrace.actors.environments.doors.environment_class import class_kind

        kind = class_kind(value, origin)
    elif isinstance(value, Door):
        kind = _of_door(value, origin)
    else:
        raise ConfigError(
            f"{origin.target} is {value!r:.80}, which is no environment; expected a headrace.SingleTurn, a"
            " headrace.ToolUse, a class that implements headrace.Environment, or a headrace.EnvironmentKind"
        )
    return kind if kind.digest else dataclasses.replace(kind, digest=target_digest(origin.target))


def _of_door(door: Door, origin: Origin) -> EnvironmentKind:
    try:
        return door.environment_kind(origin)
    except HeadraceError:
        raise
    except Exception as error:  # a door of somebody's own is foreign code
        raise ConfigError(described(error)) from error


def _entry_point_kind(name: str, found: Sequence[EntryPoint]) -> EnvironmentKind:
    """What an installed package offers under `name`. Raises ConfigError that names the package."""
    packages = [each.dist.name if each.dist else "an unknown package" for each in found]
    if len(found) > 1:
        raise ConfigError(f"{' and '.join(packages)} both offer an environment {name!r}; name its target instead")
    try:
        return _target_kind(found[0].value)
    except ConfigError as error:
        raise ConfigError(f"environment {name!r} of the package {packages[0]}: {error}") from error
