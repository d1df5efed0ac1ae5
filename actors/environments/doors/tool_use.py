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
from headrace.actors.environments.doors.rows import RowsDoor
from headrace.actors.environments.doors.tool_session import ToolUseEnvironment
from headrace.actors.environments.kind import Origin
from headrace.actors.targets import target_digest
from headrace.platform.contracts import Environment
from headrace.platform.errors import ConfigError


class ToolUse(RowsDoor):
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
        super().__init__(rows, reward, prompt, system)
        self.tools = _named(tools)

    def session(self, name: str, origin: Origin) -> Environment:
        """See `RowsDoor.session`."""
        version = target_digest(origin.target)[:12] or "1"
        return ToolUseEnvironment(name, version, self.tools, prompt=self.prompt, system=self.system)


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
