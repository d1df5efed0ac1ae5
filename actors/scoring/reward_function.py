"""A plain function as a scorer: its parameters are filled by name, and what it returns is checked.

What it may ask for: `completion`, `messages`, `task`, `episode`, the scorer's own arguments, and every column of the
row; the first that has the name wins. What the model thought is no part of its answer (`episode` has it), and neither
is what a tool said (case E3).
"""

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from headrace.actors.frames import defined_at
from headrace.actors.scoring.values import plain_number, plain_reward
from headrace.platform.errors import ConfigError
from headrace.platform.hashing import digest
from headrace.platform.records.episode import Episode
from headrace.platform.records.message import Message, RewardComponent, Task
from headrace.platform.records.status import RewardKind, Role
from headrace.platform.records.turn import Turn

_OFFERED = ("completion", "messages", "task", "episode")
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)

Opening = Callable[[Mapping[str, Any]], Sequence[Message]]


class RewardScorer:
    """A `Scorer` around a user's function.

    Args:
        reward: returns a bool or number (see `plain_number`), or a sequence of `RewardComponent`; may be async.
        args: further parameters by name, from the recipe.
        opening: the messages that a row begins with; without it they are one message of the user.

    Raises:
        ConfigError: the function cannot be called by name, or knows no such argument.
    """

    def __init__(
        self,
        reward: Callable[..., Any],
        args: Mapping[str, Any] | None = None,
        opening: Opening | None = None,
    ) -> None:
        if not callable(reward) or inspect.isclass(reward):
            raise ConfigError(f"reward must be a function, not {reward!r:.80}")
        self._reward = reward
        self._args = dict(args or {})
        self._opening = opening
        self._name = getattr(reward, "__name__", type(reward).__name__)
        self._where = defined_at(reward)
        self._parameters = inspect.signature(reward).parameters
        self._takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in self._parameters.values())
        self._check_signature()
        self.version = f"{self._name}-{_source_digest(reward)}"
        self._runner: asyncio.Runner | None = None

    def score(self, task: Task, episode: Episode) -> Sequence[RewardComponent]:
        """The components for one episode.

        Raises:
            ConfigError: a parameter that nothing fills; names what there is.
            TypeError: the function returned what is no reward.
            ValueError: it returned a number that is not finite.
            Exception: whatever the function raised.
        """
        answer = self._reward(**self._filled(task, episode))
        if inspect.isawaitable(answer):
            answer = self._awaited(answer)
        return self._components(answer)

    def score_group(self, task: Task, episodes: Sequence[Episode]) -> Sequence[Sequence[RewardComponent]]:
        """Each episode by itself."""
        return [self.score(task, episode) for episode in episodes]

    def check_columns(self, row: Mapping[str, Any]) -> None:
        """Find a parameter that neither headrace nor the row fills. Raises ConfigError that lists what there is."""
        known = [*_OFFERED, *self._args, *(column for column in row if column not in _OFFERED)]
        for name, parameter in self._parameters.items():
            if name in known or parameter.default is not parameter.empty or parameter.kind not in _BY_NAME:
                continue
            near = get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"{self._where}: {self._name} takes {name!r}, but there is only {', '.join(known)}{hint}")

    def close(self) -> None:
        """End the event loop of an async function."""
        if self._runner is not None:
            self._runner.close()
            self._runner = None

    def _check_signature(self) -> None:
        for name, parameter in self._parameters.items():
            if parameter.kind not in (*_BY_NAME, inspect.Parameter.VAR_KEYWORD):
                raise ConfigError(
                    f"{self._where}: {self._name} takes {parameter}, which has no name to fill it by;"
                    f" use parameters such as {', '.join(_OFFERED)} or a column"
                )
            if name in self._args and name in _OFFERED:
                raise ConfigError(f"{self._where}: {self._name}: {name!r} is filled by headrace; call yours otherwise")
        for name in self._args:
            if name not in self._parameters and not self._takes_all:
                raise ConfigError(
                    f"{self._where}: {self._name} has no parameter {name!r}; it takes {', '.join(self._parameters)}"
                )

    def _filled(self, task: Task, episode: Episode) -> dict[str, Any]:
        self.check_columns(task.data)
        columns = {**task.data, **self._args}
        wanted = [*self._parameters, *columns] if self._takes_all else list(self._parameters)
        filled: dict[str, Any] = {}
        for name in wanted:
            if name == "completion":
                filled[name] = completion_of(episode)
            elif name == "messages":
                filled[name] = conversation(episode, self._opening)
            elif name in ("task", "episode"):
                filled[name] = task.data if name == "task" else episode
            elif name in columns:
                filled[name] = columns[name]
        return filled

    def _awaited(self, answer: Any) -> Any:
        async def settle() -> Any:
            return await answer

        if self._runner is None:
            self._runner = asyncio.Runner()
        return self._runner.run(settle())

    def _components(self, answer: Any) -> Sequence[RewardComponent]:
        returned = f"{self._where}: {self._name} returned"
        is_sequence = isinstance(answer, tuple | list) and any(isinstance(each, RewardComponent) for each in answer)
        try:
            if is_sequence:
                return tuple(map(plain_reward, answer))
            return (RewardComponent(RewardKind.OUTCOME, plain_number(answer)),)
        except ValueError as error:
            raise ValueError(f"{returned} {error}") from None
        except TypeError as error:
            told = (
                error if is_sequence else f"{answer!r:.80}; expected a number or a sequence of headrace.RewardComponent"
            )
            raise TypeError(f"{returned} {told}") from None


def _source_digest(function: Callable[..., Any]) -> str:
    """The beginning of a hash of the file that the function is in; "1" where that cannot be told."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    file = Path(code.co_filename) if code is not None else Path()
    return digest(file.read_bytes())[:12] if file.is_file() else "1"


def completion_of(episode: Episode) -> str:
    """The content of the last assistant message; empty where there is none."""
    return next((turn.content for turn in reversed(episode.turns) if turn.role is Role.ASSISTANT), "")


def conversation(episode: Episode, opening: Opening | None = None) -> list[dict[str, Any]]:
    """The episode as dicts with `role` and `content`, and where there are any `tool_calls` (`id`, `name`,
    `arguments`) and `tool_call_id`. Without `opening` all that was said before the model spoke is one message, and so
    are the results of parallel calls always."""
    first, rest = episode.turns[:1], episode.turns[1:]
    if opening is not None and first:
        told = [{"role": str(each.role), "content": each.content} for each in opening(episode.task.data)]
    else:
        told = [_as_dict(turn) for turn in first]
    return [*told, *map(_as_dict, rest)]


def _as_dict(turn: Turn) -> dict[str, Any]:
    message: dict[str, Any] = {"role": str(turn.role), "content": turn.content}
    if turn.tool_calls:
        message["tool_calls"] = [
            {"id": call.call_id, "name": call.name, "arguments": call.arguments} for call in turn.tool_calls
        ]
    if turn.tool_call_id:
        message["tool_call_id"] = turn.tool_call_id
    return message
