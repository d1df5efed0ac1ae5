"""The second door: typed Python functions as tools; the model calls them until it answers.

::

    def add(a: int, b: int) -> int:
        \"\"\"Add two numbers.\"\"\"
        return a + b

    Sums = headrace.ToolUse("sums.jsonl", tools=[add], reward=reward)
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headrace.actors.environments.doors.function_schema import ToolFunction, tool_function
from headrace.actors.environments.doors.prompts import opening_messages
from headrace.actors.environments.doors.rows import refuse_args, row_tasks
from headrace.actors.environments.doors.tool_session import ToolUseEnvironment
from headrace.actors.environments.kind import EnvironmentKind, Origin
from headrace.actors.scoring.reward_function import RewardScorer
from headrace.actors.targets import target_digest
from headrace.platform.config.environments import ScorerConfig
from headrace.platform.contracts import Environment, Scorer
from headrace.platform.errors import ConfigError
from headrace.platform.records.message import Message


class ToolUse:
    """An environment out of functions: a message with calls runs them in order, one without ends the episode.

    A call that does not fit (an unknown tool, a wrong or missing argument), and a `headrace.ToolError` that a tool
    raises, are answered with what is wrong, and the episode goes on. Anything else that a tool raises is a fault of
    the environment. A result that is text is shown as it is, None as `ok`, anything else as JSON with sorted keys;
    NaN, bytes and keys that are no text are faults of the tool.

    Episodes are replayed, restored and cloned by calling the tools again, so that a tool must depend on nothing but its
    arguments, the `headrace.Session` and what is in it. Plain tools run in threads and may block.

    Args:
        rows: as in `SingleTurn`.
        tools: functions or bound methods, plain or async, with a type for each parameter; see `function_schema`.
        reward: as in `SingleTurn`; `completion` is the last message of the model.
        prompt: the column that holds the question as text, or a list of messages with `role` and `content`.
        system: a system message before it.

    Raises:
        ConfigError: for a tool or a reward that cannot be called by name; names file, line and parameter.
    """

    def __init__(
        self,
        rows: Any,
        *,
        tools: Sequence[Callable[..., Any]],
        reward: Callable[..., Any],
        prompt: str = "prompt",
        system: str = "",
    ) -> None:
        self.rows = rows
        self.tools = _named(tools)
        self.reward = reward
        self.prompt = prompt
        self.system = system
        self.scorer()

    def opening(self, row: Mapping[str, Any]) -> tuple[Message, ...]:
        """The messages that a row begins with. Raises ValueError."""
        return opening_messages(row, self.prompt, self.system)

    def scorer(self) -> Scorer:
        """What grades the episodes, in its own process."""
        return RewardScorer(self.reward, opening=self.opening)

    def environment_kind(self, origin: Origin) -> EnvironmentKind:
        """See `Door`."""
        name = origin.target.rpartition(":")[2]
        version = target_digest(origin.target)[:12] or "1"

        def build(args: dict[str, Any]) -> Environment:
            refuse_args(args, name)
            return ToolUseEnvironment(name, version, self.tools, prompt=self.prompt, system=self.system)

        def check_row(row: Mapping[str, Any]) -> None:
            self.opening(row)
            RewardScorer(self.reward).check_columns(row)

        return EnvironmentKind(
            environment=build,
            tasks=None if self.rows is None else row_tasks(self.rows, origin, name, check_row),
            scorer=ScorerConfig(kind=origin.target),
            check_row=check_row,
        )


def _named(tools: Sequence[Callable[..., Any]]) -> Mapping[str, ToolFunction]:
    if not isinstance(tools, list | tuple) or not tools:
        raise ConfigError(f"tools must be a list of at least one function, not {tools!r:.80}")
    named: dict[str, ToolFunction] = {}
    for function in tools:
        tool = tool_function(function)
        if tool.spec.name in named:
            raise ConfigError(f"two tools are called {tool.spec.name!r}; rename one of the functions")
        named[tool.spec.name] = tool
    return named
