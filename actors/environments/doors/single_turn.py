"""The first door: rows of data and a reward function; one question, one answer.

::

    def reward(completion: str, answer: str) -> float:
        return float(completion.strip() == answer)

    Sums = headrace.SingleTurn("sums.jsonl", reward=reward)
"""

from collections.abc import Callable, Sequence
from typing import Any

from headrace.actors.environments.base import ReplayedEnvironment
from headrace.actors.environments.doors.prompts import opening_messages
from headrace.actors.environments.doors.rows import RowsDoor
from headrace.actors.environments.kind import Origin
from headrace.platform.contracts import Environment
from headrace.platform.errors import EnvironmentFault
from headrace.platform.hashing import digest_value, hash_value
from headrace.platform.records.message import Message, Observation, StepResult, Task, ToolSpec
from headrace.platform.records.status import Role, Status


class SingleTurn(RowsDoor):
    """An environment out of a data set: the model reads a row's prompt and answers once.

    Args:
        rows: a list of dicts; a path of JSON lines, Parquet or a folder, relative to the file that says so; a function
            or any callable from a seed to a row; a `datasets` data set; or None, where the recipe names the tasks.
        reward: a function whose parameters are filled by name: `completion` (the model's answer as text), `messages`
            (the conversation as dicts), `task` (the row), `episode` (the whole record) and any column of the row. It
            returns a number, or a sequence of `RewardComponent`; it may be async. It runs in a process of its own: a
            raise, a time-out or None is no reward, never a zero (case E1).
        prompt: the column that holds the question as text, or a list of messages with `role` and `content`.
        system: a system message before it.

    Raises:
        ConfigError: for a reward that cannot be called by name.
    """

    def __init__(self, rows: Any, *, reward: Callable[..., Any], prompt: str = "prompt", system: str = "") -> None:
        super().__init__(rows, reward, prompt, system)

    def session(self, name: str, origin: Origin) -> Environment:
        """See `RowsDoor.session`."""
        return SingleTurnEnvironment(name, prompt=self.prompt, system=self.system)


class SingleTurnEnvironment(ReplayedEnvironment):
    """One question and one answer, whatever it is: text, nothing, or a call of a tool that does not exist.

    Gives no reward: the scorer does.

    Args:
        name: the environment's.
        prompt: the column of the task's data that holds the question.
        system: a system message before it.
    """

    def __init__(self, name: str, prompt: str = "prompt", system: str = "") -> None:
        self.name = name
        self.version = digest_value([prompt, system])[:12]
        self._prompt = prompt
        self._system = system
        self._row: dict[str, Any] = {}

    def tools(self) -> Sequence[ToolSpec]:
        """None."""
        return ()

    async def _reset(self, task: Task, seed: int) -> Observation:
        self._row = task.data
        try:
            messages = opening_messages(task.data, self._prompt, self._system)
        except ValueError as error:
            raise EnvironmentFault(f"{self.name}: task {task.task_id}: {error}", transient=False) from None
        return Observation(messages, hash_value([self._row]))

    async def _step(self, message: Message) -> StepResult:
        state = hash_value([self._row, message.content, len(message.tool_calls)])
        if not message.tool_calls:
            return StepResult(terminated=True, state_hash=state)
        told = tuple(
            Message(Role.TOOL, f"error: there is no tool {call.name}; answer in words", tool_call_id=call.call_id)
            for call in message.tool_calls
        )
        return StepResult(told, terminated=True, status=Status.MODEL_INVALID_ACTION, state_hash=state)
