"""What headrace knows of an environment before it builds one: how to make sessions, tasks, and who grades."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from headrace.platform.config.environments import ScorerConfig
from headrace.platform.contracts import Environment, Renderer, TaskSource

if TYPE_CHECKING:  # what it stands on names targets, which are described here
    from headrace.actors.environments.sandboxed import SandboxedEnvironment

Trace = tuple[list[int], list[int]]
"""Token ids and action mask of a demonstration, both of length L."""


@dataclass(kw_only=True, slots=True)
class EnvironmentKind:
    """How one kind of environment is built.

    `environment` and `tasks` take the recipe's `args`, each what it knows; `tasks(split, seed, args)` is None where a
    recipe has to name a source of tasks. `scorer` grades where the recipe names no other. For environments that bring
    their own, `demonstrations(renderer, seed, guess_share, args)` gives SFT traces and `tokenizer_files` the tokenizer
    of the tiny model. `digest` is a hash of the code behind it, empty for what headrace ships.

    `sandboxed` builds it for a recipe that names a sandbox; None where it can use none. An environment that always
    needs one has both.

    Where a recipe names tasks of its own: `environment_args` are the args that count then, None if any may, and
    `check_row` raises ConfigError or ValueError for a row that cannot be played.
    """

    environment: Callable[[dict[str, Any]], Environment]
    tasks: Callable[[str, int, dict[str, Any]], TaskSource] | None = None
    scorer: ScorerConfig | None = None
    demonstrations: Callable[[Renderer, int, float, dict[str, Any]], Iterator[Trace]] | None = None
    tokenizer_files: Callable[[], dict[str, bytes]] | None = None
    sandboxed: "Callable[[dict[str, Any]], SandboxedEnvironment] | None" = None
    digest: str = ""
    environment_args: tuple[str, ...] | None = None
    check_row: Callable[[Mapping[str, Any]], None] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """Where a user's object was found: the target as a recipe names it, and the file that defines it."""

    target: str
    file: Path


@runtime_checkable
class Door(Protocol):
    """An object that stands for an environment, such as `headrace.SingleTurn` or `headrace.ToolUse`."""

    def environment_kind(self, origin: Origin) -> EnvironmentKind:
        """The kind; relative paths in the object are relative to `origin.file`. Raises ConfigError."""
