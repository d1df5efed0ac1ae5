"""`lookup` with its store as files in a sandbox, one for each key, which `get` reads by a command.

Observations, states, tasks and rewards are those of `LookupEnvironment`; the version is another, for what can go wrong
is. The value that answers the task is compared in the worker, out of reach of what runs in the box (case X5).
"""

import shlex

from headrace.actors.environments.lookup.environment import LookupEnvironment
from headrace.actors.environments.sandboxed import SandboxedEnvironment
from headrace.platform.errors import EnvironmentFault
from headrace.platform.records.message import Message, Observation, StepResult, Task, ToolCall

_STORE = "store"
_READ_S = 10.0
_MISSING = 1  # the exit code of cat for a file that is not there
_LONGEST_KEY = 64


class SandboxedLookup(SandboxedEnvironment, LookupEnvironment):
    """One session. Arguments as those of `LookupEnvironment`."""

    version = "1-sandbox"

    async def _reset(self, task: Task, seed: int) -> Observation:
        opening = await LookupEnvironment._reset(self, task, seed)
        behind = [*(f"@{key}" for key in self._chain[1:]), self._answer]
        for key, content in zip(self._chain, behind, strict=True):
            await self.box.write(f"{_STORE}/{key}", content.encode())
        return opening

    async def _step(self, message: Message) -> StepResult:
        if not message.tool_calls:
            return self._judged(message)
        await self._wait()
        return self._answered(message.tool_calls, [await self._read_file(call) for call in message.tool_calls])

    async def _read_file(self, call: ToolCall) -> str:
        """As `LookupEnvironment._read`.

        Raises:
            EnvironmentFault: the box has no `cat`, or it did not answer in time: the command is ours, not the model's.
        """
        key = self._asked(call)
        if not _names_a_file(key):
            return ""
        result = await self.box.run(f"cat {shlex.quote(f'{_STORE}/{key}')}", _READ_S)
        if result.exit_code == 0:
            return f"{key}={result.output}"
        if result.exit_code == _MISSING:
            return ""
        told = f"exit code {result.exit_code}" if result.limit == "" else f"stopped by its limit of {result.limit}"
        raise EnvironmentFault(f"lookup: a read of the store failed: {told}: {result.output:.200}", bool(result.limit))


def _names_a_file(key: str) -> bool:
    """Whether a key, which is the model's text, can name a file of the store and nothing else."""
    is_plain = key.isascii() and key.isprintable() and "/" not in key
    return is_plain and len(key) <= _LONGEST_KEY and key.strip(".") != ""
