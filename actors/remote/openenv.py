"""Stock OpenEnv servers as hosts: what they show becomes text for the model, what the model says becomes an action.

A server knows no tasks, keys, statuses or hashes: a task is a seed (and whatever else its `reset` takes), a repeated
key is answered from a table here, the hash is that of the observation. `reward` is an outcome component of the step
that brought it; `done` is the end. Snapshots are not offered. An action that the server refuses as invalid is the
model's mistake where the model chose its fields, and the recipe's where it did not. A `reward` or `done` of another
type is the environment's fault.
"""

import asyncio
import http.client
import json
import math
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from pydantic import Field, ValidationError

from headrace.actors.remote.client import Place, PooledSession, raise_error
from headrace.actors.remote.link import Link
from headrace.actors.remote.protocol import Code, Hello, Said
from headrace.platform.config.base import StrictModel
from headrace.platform.errors import ConfigError, EnvironmentFault, HostAway
from headrace.platform.hashing import hash_value
from headrace.platform.records.message import (
    Cost,
    HashPair,
    Message,
    Observation,
    RewardComponent,
    StepResult,
    Task,
    ToolCall,
    ToolSpec,
)
from headrace.platform.records.status import RewardKind, Role, Status

# A server does not say how many sessions it plays at once; it refuses the others.
_PLACES = 64
_MOST_PAGE = 2**20
_MOST_TOLD = 4000
_FORM_ERRORS = ("missing", "extra_forbidden")
_FIELDS: dict[str, Any] = {"observation": None, "reward": None, "done": False}


class ToolForm(StrictModel):
    """A tool as the model sees it: its arguments become the fields of the action."""

    name: str = Field(min_length=1)
    description: str = ""
    parameters: dict[str, Any] = Field(default_factory=lambda: {"type": "object", "properties": {}})


class OpenEnvForm(StrictModel):
    """How an environment behind OpenEnv is played: the `args` of a recipe's `openenv` environment."""

    prompt: str = "{observation}"
    """The opening message; `{observation}` stands for what the server shows at first."""
    system: str = ""
    """A system message before it."""
    observation_field: str = ""
    """The field of an observation that the model sees; empty for all of it as JSON."""
    action_field: str = "message"
    """The field of an action that gets what the model says in words; empty where it must call a tool."""
    action: dict[str, Any] = Field(default_factory=dict)
    """Fields that every action has besides."""
    tools: tuple[ToolForm, ...] = ()
    tool_field: str = ""
    """The field of an action that gets the name of the tool that was called."""
    reset: dict[str, Any] = Field(default_factory=dict)
    """Parameters of every reset, besides those of the task."""
    version: str = ""
    """What to call the environment's version where the server does not say."""


def form_of(args: Mapping[str, Any]) -> OpenEnvForm:
    """The form that a recipe's args describe. Raises ConfigError."""
    try:
        return OpenEnvForm.model_validate(dict(args))
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
        raise ConfigError(
            f"environments.openenv.args: {problems}; known: {', '.join(OpenEnvForm.model_fields)}"
        ) from None


class OpenEnvSession(PooledSession):
    """A session on a stock OpenEnv server."""

    def __init__(self, pool: Any, group: Any, begin_s: float, step_s: float, form: OpenEnvForm) -> None:
        super().__init__(pool, group, begin_s, step_s)
        self._form = form
        self._results: dict[str, tuple[Message, StepResult]] = {}
        self._has_ended = False

    def tools(self) -> Sequence[ToolSpec]:
        """See `Environment.tools`."""
        return tuple(
            ToolSpec(name=each.name, description=each.description, parameters=each.parameters)
            for each in self._form.tools
        )

    async def _begin(self, place: Place, task: Task, seed: int, seconds: float) -> Observation:
        self._results, self._has_ended = {}, False
        data = {"seed": seed % 2**31, **self._form.reset, **task.data}
        said = await place.link.ask("reset", data, seconds)
        if said.type != "observation":
            raise_error(said, place.link.address)
        shown, _, done = self._parts(said, place)
        if done:
            raise EnvironmentFault(f"{self.name}: done at reset", transient=False)
        messages = [Message(Role.SYSTEM, self._form.system)] if self._form.system else []
        messages.append(Message(Role.USER, self._form.prompt.replace("{observation}", self._text(shown))))
        return Observation(tuple(messages), _hash(said), self._rest(shown))

    async def _act(self, place: Place, message: Message, key: str, seconds: float) -> StepResult:
        if key in self._results:
            known, result = self._results[key]
            if known != message:
                raise EnvironmentFault(f"key {key!r} was used for another message", transient=False)
            return result
        if self._has_ended:
            raise EnvironmentFault(f"{self.name}: step after the end of the episode", transient=False)
        result = await self._played(place, message, seconds)
        self._has_ended = result.terminated
        self._results[key] = (message, result)
        return result

    async def _played(self, place: Place, message: Message, seconds: float) -> StepResult:
        """One action for each tool call, or one for the words; the first that ends or is refused is the last."""
        loop = asyncio.get_running_loop()
        ends = loop.time() + seconds
        actions = self._actions(message)
        if not actions:
            names = ", ".join(each.name for each in self._form.tools)
            text = Message(Role.USER, f"call one of these tools: {names}")
            return StepResult((text,), status=Status.MODEL_INVALID_ACTION)
        messages, rewards, rest = [], [], {}
        done, status, hashes = False, Status.OK, HashPair()
        for call, action in actions:
            said = await place.link.ask("step", action, max(ends - loop.time(), 0.001))
            hashes = _hash(said)
            if (wrong := self._mistake(said, call, place)) is not None:
                messages.append(_answer(call, wrong))
                status = Status.MODEL_INVALID_ACTION
                break
            shown, reward, done = self._parts(said, place)
            rest = self._rest(shown)
            if text_shown := self._text(shown):
                messages.append(_answer(call, text_shown))
            if reward is not None:
                rewards.append(RewardComponent(RewardKind.OUTCOME, reward))
            if done:
                break
        return StepResult(
            messages=tuple(messages),
            rewards=tuple(rewards),
            terminated=done,
            status=status,
            cost=Cost(tool_calls=len(message.tool_calls)),
            state_hash=hashes,
            metadata=rest,
        )

    def _actions(self, message: Message) -> list[tuple[ToolCall | None, dict[str, Any]]]:
        form = self._form
        if message.tool_calls:
            named = [{form.tool_field: call.name} if form.tool_field else {} for call in message.tool_calls]
            return [
                (call, {**call.arguments, **form.action, **name})
                for call, name in zip(message.tool_calls, named, strict=True)
            ]
        return [(None, {**form.action, form.action_field: message.content})] if form.action_field else []

    def _mistake(self, said: Said, call: ToolCall | None, place: Place) -> str | None:
        """What the server has against the action, None for an observation; raises what is not the model's fault."""
        if said.type == "observation":
            return None
        if said.type != "error" or said.data.get("code") != Code.VALIDATION_ERROR:
            raise_error(said, place.link.address)
        errors = said.data.get("errors") or []
        errors = errors if isinstance(errors, list) else [errors]
        told = "; ".join(map(_told, errors))[:_MOST_TOLD]
        kinds = [each.get("type") for each in errors if isinstance(each, dict)]
        if call is None and any(kind in _FORM_ERRORS for kind in kinds):
            raise EnvironmentFault(f"the recipe's action_field or action does not fit: {told}", transient=False)
        return told or str(said.data.get("message", "invalid"))[:_MOST_TOLD]

    def _parts(self, said: Said, place: Place) -> tuple[dict[str, Any], float | None, bool]:
        """Observation, reward and done. Raises HostAway for what is no observation, EnvironmentFault for its fields."""
        shown, reward, done = (said.data.get(name, default) for name, default in _FIELDS.items())
        if not isinstance(shown, dict):
            raise HostAway(f"{place.link.address} speaks otherwise: an observation without its fields")
        if not isinstance(done, bool):  # the text "false" is no end
            raise EnvironmentFault(f"{self.name}: done is {done!r:.80}; expected true or false", transient=False)
        if reward is not None and not _is_number(reward):
            raise EnvironmentFault(f"{self.name}: reward is {reward!r:.80}; expected a finite number", transient=False)
        return shown, None if reward is None else float(reward), done

    def _text(self, shown: Mapping[str, Any]) -> str:
        field = self._form.observation_field
        if not field:
            return json.dumps(shown, ensure_ascii=False)
        if field not in shown:
            known = ", ".join(shown)[:_MOST_TOLD]
            raise EnvironmentFault(f"the recipe's observation_field {field!r} is not among {known}", transient=False)
        value = shown[field]
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    def _rest(self, shown: Mapping[str, Any]) -> dict[str, Any]:
        """What the model does not see, for the record (case X16)."""
        field = self._form.observation_field
        return {name: value for name, value in shown.items() if name != field} if field else {}


class Greeter:
    """Makes a `Hello` for a server that knows none: name and version are on its page `/metadata`.

    It is read for each connection, after that is open: a server that comes back at the same address in another version
    has dropped the connections of the old one, so a connection that still answers belongs to what was read (P17).
    """

    def __init__(self, environment: str, token: str, version: str) -> None:
        self._environment, self._token, self._version = environment, token, version

    async def __call__(self, link: Link, seconds: float) -> Hello:
        """Who is at the other end of `link`. Raises HostAway."""
        try:
            async with asyncio.timeout(seconds):
                version = await asyncio.to_thread(self._read, link.address, seconds)
        except TimeoutError:
            raise HostAway(f"{link.address} did not say what it plays within {seconds:.3g} s") from None
        return Hello(environment=self._environment, version=version, capacity=_PLACES)

    def _read(self, address: str, seconds: float) -> str:
        url = f"http{address.removeprefix('ws').rstrip('/')}/metadata"
        headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(urllib.request.Request(url, headers=headers), timeout=seconds) as page:  # ws:// or wss://
                said = msgspec.json.decode(page.read(_MOST_PAGE))
        except urllib.error.HTTPError:
            said = None  # it plays, and does not say what
        except (OSError, http.client.HTTPException, ValueError, msgspec.MsgspecError, RecursionError) as error:
            raise HostAway(f"{address} does not say what it plays: {error!s:.200}") from None
        version = said.get("version") if isinstance(said, dict) else None
        return str(version if isinstance(version, str | int | float) and version else self._version or "unknown")


def _answer(call: ToolCall | None, text: str) -> Message:
    return Message(Role.USER, text) if call is None else Message(Role.TOOL, text, tool_call_id=call.call_id)


def _told(error: Any) -> str:
    """One of a server's complaints about an action, of whatever form."""
    if not isinstance(error, dict):
        return str(error)
    place = error.get("loc", ())
    place = ".".join(map(str, place)) if isinstance(place, list | tuple) else str(place)
    return f"{place}: {error.get('msg', '')}"


def _is_number(value: Any) -> bool:
    """Whether a server may send it as a reward: OpenEnv has whole numbers, true and false among them."""
    try:
        return isinstance(value, int | float) and math.isfinite(value)
    except OverflowError:  # a whole number that no float holds
        return False


def _hash(said: Said) -> HashPair:
    return hash_value(said.data)
