"""`harness`: an environment whose world is somebody else's program.

It opens with what the task says, and that is all that headrace plays of it: the harness does the rest, tools included.
So nothing of it can be run again, and its steps say so.
"""

import json
from collections.abc import Sequence
from typing import Any

from pydantic import Field, ValidationError

from headrace.actors.environments.adapter import NOWHERE
from headrace.actors.environments.arguments import check_args
from headrace.actors.environments.doors.prompts import opening_messages
from headrace.actors.environments.kind import EnvironmentKind
from headrace.platform.config.base import StrictModel
from headrace.platform.errors import ConfigError, EnvironmentFault
from headrace.platform.hashing import hash_value
from headrace.platform.records.message import Message, Observation, StepResult, Task, ToolSpec

HARNESS = "harness"


class HarnessArgs(StrictModel):
    """What `args` of a `harness` environment may say."""

    prompt: str = "prompt"
    """The column of a task that holds the user's message, or a list of messages."""
    system: str = ""
    """A system message before it."""
    shown: tuple[str, ...] = ()
    """Columns of a task that the harness is told beside the messages; the answer should not be among them."""
    host: str = "127.0.0.1"
    """Where the door of each rollout worker listens; anything but loopback needs a token."""
    port: int = Field(0, ge=0, le=65535)
    """The first worker's port, the next one's is one higher; 0 takes free ones."""
    token: str = ""
    """What clients must show, as `${env:NAME}` or `${file:PATH}`."""
    take_s: float = Field(300.0, gt=0)
    """How long an episode waits for a harness before it counts as a fault and is offered again."""
    command: tuple[str, ...] = ()
    """A program that plays one episode; the worker starts one for each, and its end is the end of the episode."""
    env: dict[str, str] = Field(default_factory=dict)
    """More environment variables of that program."""


def harness_args(args: dict[str, Any]) -> HarnessArgs:
    """The checked arguments. Raises ConfigError."""
    check_args(args, HarnessArgs.model_fields, HARNESS)
    try:
        return HarnessArgs.model_validate(args)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
        raise ConfigError(f"environments.{HARNESS}.args: {problems}") from None


class HarnessEnvironment:
    """One session: its opening."""

    name = HARNESS
    version = "1"
    provenance = NOWHERE

    def __init__(self, args: HarnessArgs) -> None:
        self._args = args

    def tools(self) -> Sequence[ToolSpec]:
        """None: the harness brings its own, outside of headrace's gateway."""
        return ()

    async def reset(self, task: Task, seed: int) -> Observation:
        """The task's messages, and what of its data is shown to the harness."""
        try:
            messages = opening_messages(task.data, self._args.prompt, self._args.system)
        except ValueError as error:
            raise EnvironmentFault(f"task {task.task_id}: {error}", transient=False) from error
        shown = {key: task.data[key] for key in self._args.shown if key in task.data}
        try:
            json.dumps(shown, ensure_ascii=False, allow_nan=False).encode()
        except (TypeError, ValueError, RecursionError) as error:  # or whoever takes it would get an error instead
            told = f"task {task.task_id}: what args.shown names cannot be sent as JSON: {error}"
            raise EnvironmentFault(told, transient=False) from error
        metadata = {"task_id": task.task_id, "seed": seed, **shown}
        return Observation(messages, hash_value([task.task_id, task.data]), metadata)

    async def step(self, message: Message, key: str) -> StepResult:
        """Raises EnvironmentFault: what a harness did is not done again."""
        told = "the episode was played by a harness outside of headrace, which cannot be run again"
        raise EnvironmentFault(told, transient=False)

    async def snapshot(self) -> str:
        """Raises EnvironmentFault, as every step."""
        raise EnvironmentFault("a harness has no snapshots", transient=False)

    async def restore(self, snapshot_id: str) -> None:
        """Raises EnvironmentFault, as every step."""
        raise EnvironmentFault("a harness has no snapshots", transient=False)

    async def clone(self) -> "HarnessEnvironment":
        """Raises EnvironmentFault, as every step."""
        raise EnvironmentFault("a harness cannot be cloned", transient=False)

    async def close(self) -> None:
        """Nothing to release."""


HARNESS_KIND = EnvironmentKind(environment=lambda args: HarnessEnvironment(harness_args(args)))
