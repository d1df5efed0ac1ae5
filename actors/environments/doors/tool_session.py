"""One session of functions as tools: reads calls, runs them in order, answers each, and tells mistakes from faults."""

import copy
import functools
import json
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from headrace.actors.environments.base import ReplayedEnvironment
from headrace.actors.environments.doors.function_schema import InvalidArguments, ToolFunction
from headrace.actors.environments.doors.prompts import opening_messages
from headrace.actors.environments.doors.session import Session, ToolError
from headrace.actors.environments.doors.tool_result import result_text
from headrace.actors.frames import described
from headrace.actors.text import well_formed_text
from headrace.platform.errors import EnvironmentFault
from headrace.platform.hashing import hash_value
from headrace.platform.records.message import Cost, HashPair, Message, Observation, StepResult, Task, ToolCall, ToolSpec
from headrace.platform.records.status import Role, Status

_RETRYABLE = (ConnectionError, TimeoutError)


class ToolUseEnvironment(ReplayedEnvironment):
    """Calls functions for the model. Gives no reward: the scorer does.

    Args:
        name: the environment's.
        version: changes when the functions do.
        tools: by the name that the model uses.
        prompt: the column of the task's data that holds the question.
        system: a system message before it.
    """

    def __init__(
        self, name: str, version: str, tools: Mapping[str, ToolFunction], prompt: str = "prompt", system: str = ""
    ) -> None:
        self.name = name
        self.version = version
        self._tools = tools
        self._specs = tuple(tool.spec for tool in tools.values())
        self._prompt = prompt
        self._system = system
        self._row: dict[str, Any] = {}
        self._session = Session(task={}, seed=0)
        self._history: list[list[str]] = []

    def tools(self) -> Sequence[ToolSpec]:
        """One for each function."""
        return self._specs

    async def _reset(self, task: Task, seed: int) -> Observation:
        self._row = task.data
        self._session = Session(task=copy.deepcopy(task.data), seed=seed)  # a tool may change it (case X13)
        self._history = []
        try:
            messages = opening_messages(task.data, self._prompt, self._system)
        except ValueError as error:
            raise EnvironmentFault(f"{self.name}: task {task.task_id}: {error}", transient=False) from None
        return Observation(messages, self._state_hash())

    async def _step(self, message: Message) -> StepResult:
        if not message.tool_calls:
            self._history.append(["", message.content])
            return StepResult(terminated=True, state_hash=self._state_hash())
        told, status = [], Status.OK
        for call in message.tool_calls:
            try:
                text = await self._result(call)
            except (InvalidArguments, ToolError) as error:  # case X1
                text, status = f"error: {error}", Status.MODEL_INVALID_ACTION
            told.append(Message(Role.TOOL, text, tool_call_id=call.call_id))
            self._history.append([call.name, json.dumps(call.arguments, sort_keys=True, default=str), text])
        return StepResult(tuple(told), status=status, cost=Cost(tool_calls=len(told)), state_hash=self._state_hash())

    async def _result(self, call: ToolCall) -> str:
        """What a call gives, as text.

        Raises:
            InvalidArguments: there is no such tool, or it cannot be called so.
            ToolError: the tool's own word on a mistake of the model.
            EnvironmentFault: the tool broke, or returned what is not JSON.
        """
        tool = self._tools.get(call.name)
        if tool is None:
            near = get_close_matches(call.name, self._tools, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there is {', '.join(self._tools)}"
            raise InvalidArguments(f"there is no tool {call.name!r:.80}; {hint}")
        arguments = tool.read(call.arguments)
        if tool.session:
            arguments[tool.session] = self._session
        try:
            value = await self._off_loop.call(functools.partial(tool.function, **arguments))
        except (ToolError, EnvironmentFault):
            raise
        except (Exception, SystemExit) as error:  # foreign code: its fault, at its own file and line
            raise EnvironmentFault(described(error), transient=isinstance(error, _RETRYABLE)) from error
        return well_formed_text(result_text(value, tool))

    def _state_hash(self) -> HashPair:
        """Of the row, the calls so far with their results, and the session's state."""
        return hash_value([self._row, self._history, _state_text(self._session)])


def _state_text(session: Session) -> str:
    """The state as JSON; empty where it is none."""
    try:
        return json.dumps(session.state, sort_keys=True)
    except (TypeError, ValueError):
        return ""
