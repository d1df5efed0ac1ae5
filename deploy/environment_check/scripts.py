"""Assistant messages that play an episode: what the environment demonstrates, or else random play.

An environment may offer `demonstrate(task) -> list of Message`, a static method: messages of the assistant that play
the task to its end, with the last one and not before. Without it, calls that fit the tools' schemas and answers in
words that were just read are tried, until an episode ends or has had its turns.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headrace.actors.environments.answers import checked_observation, checked_step, checked_tools
from headrace.platform.contracts import Environment
from headrace.platform.errors import EnvironmentFault
from headrace.platform.records.message import Message, Observation, StepResult, Task, ToolCall, ToolSpec
from headrace.platform.records.status import Role
from headrace.platform.testing.conformance.support import settled

MOST_TURNS = 16
_TRIES = 8
_ENOUGH = 3  # the conformance suite checks the most with so many messages
_DEEPEST = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Script:
    """The messages, whether the last one ends the episode, whether states were hashed on the way, and whether the
    environment showed it."""

    messages: tuple[Message, ...]
    ends: bool
    hashed: bool
    demonstrated: bool = False


async def script_for(make: Callable[[], Environment], task: Task, seed: int) -> Script:
    """A script for `task`; every answer of the environment is checked for its type on the way.

    Raises:
        EnvironmentFault: something of a wrong type was returned or demonstrated; names the method.
        Exception: whatever the environment raised.
    """
    demonstrate = getattr(make(), "demonstrate", None)
    if demonstrate is not None:
        shown = _checked_demonstration(demonstrate(task))
        script = await _play(make(), task, seed, lambda turn, tools, words: shown[turn], len(shown))
        if not script.ends or len(script.messages) < len(shown):
            raise EnvironmentFault(
                f"demonstrate shows {len(shown)} messages for task {task.task_id}, but the episode"
                f" {'ends after ' + str(len(script.messages)) if script.ends else 'goes on after them'}",
                transient=False,
            )
        return replace(script, demonstrated=True)
    best: Script | None = None
    for attempt in range(_TRIES):
        player = _RandomPlayer(attempt)
        script = await _play(make(), task, seed, player.message, MOST_TURNS)
        if script.ends and len(script.messages) >= _ENOUGH:
            return script
        if best is None or (script.ends, len(script.messages)) > (best.ends, len(best.messages)):
            best = script
    assert best is not None
    return best


def _checked_demonstration(shown: Any) -> Sequence[Message]:
    is_list = isinstance(shown, list | tuple) and shown
    if not is_list or any(not isinstance(each, Message) or each.role is not Role.ASSISTANT for each in shown):
        raise EnvironmentFault(
            f"demonstrate returned {shown!r:.120}; expected a list of headrace.Message of the assistant", False
        )
    messages: Sequence[Message] = shown
    return messages


Speaker = Callable[[int, Sequence[ToolSpec], Sequence[str]], Message]
"""The next message, by turn, tools and the words that were just read."""


async def _play(session: Environment, task: Task, seed: int, speak: Speaker, turns: int) -> Script:
    """Play at most `turns` turns."""
    tools = checked_tools(session.tools(), session.tools)
    seen: Observation | StepResult = checked_observation(await settled(session.reset(task, seed)), session.reset)
    messages: list[Message] = []
    hashed, ended = bool(seen.state_hash.canonical), False
    while len(messages) < turns and not ended:
        words = " ".join(message.content for message in seen.messages).split()
        message = speak(len(messages), tools, words)
        answer = checked_step(await settled(session.step(message, f"script/{len(messages)}")), session.step)
        messages.append(message)
        if answer.status.is_error:
            raise EnvironmentFault(f"step answered {answer.status}; a failure of the environment is raised", False)
        seen, hashed, ended = (
            answer,
            hashed and bool(answer.state_hash.canonical),
            answer.terminated or answer.truncated,
        )
    await settled(session.close())
    return Script(messages=tuple(messages), ends=ended, hashed=hashed)


class _RandomPlayer:
    """Calls tools for a number of turns, which differs from attempt to attempt, and then answers in words."""

    def __init__(self, attempt: int) -> None:
        self._rng = random.Random(attempt)
        self._calls = (_ENOUGH - 1, _ENOUGH, MOST_TURNS, 1, 0)[attempt % 5]

    def message(self, turn: int, tools: Sequence[ToolSpec], words: Sequence[str]) -> Message:
        """See `Speaker`."""
        pool = [*words, *("".join(filter(str.isalnum, word)) for word in words), "1", "yes", "no"]
        if not tools or turn >= self._calls:
            return Message(Role.ASSISTANT, self._rng.choice(pool))
        tool = self._rng.choice(tools)
        arguments = random_value({"type": "object", **tool.parameters}, self._rng, pool)
        return Message(Role.ASSISTANT, tool_calls=(ToolCall(tool.name, arguments, "call_0"),))


def random_value(schema: Any, rng: random.Random, words: Sequence[str], root: Any = None, depth: int = 0) -> Any:
    """A JSON value that fits the common part of JSON Schema; optional properties are left out in half of the cases."""
    root = schema if root is None else root
    if not isinstance(schema, dict):
        return None
    if name := schema.get("$ref"):
        return random_value(root.get("$defs", {}).get(name.rpartition("/")[2], {}), rng, words, root, depth + 1)
    if "const" in schema:
        return schema["const"]
    for key in ("enum", "anyOf", "oneOf"):
        if schema.get(key):
            chosen = rng.choice(schema[key])
            return chosen if key == "enum" else random_value(chosen, rng, words, root, depth)
    kind = schema.get("type", "string")
    match rng.choice(kind) if isinstance(kind, list) else kind:
        case "object":
            required = schema.get("required", ())
            return {
                key: random_value(each, rng, words, root, depth + 1)
                for key, each in schema.get("properties", {}).items()
                if key in required or (depth < _DEEPEST and rng.random() < 0.5)
            }
        case "array":
            least = schema.get("minItems", 0 if depth >= _DEEPEST else 1)
            return [random_value(schema.get("items", {}), rng, words, root, depth + 1) for _ in range(least)]
        case "integer" | "number":
            low = schema.get("minimum", schema.get("exclusiveMinimum", 0) + ("exclusiveMinimum" in schema))
            return rng.randint(int(low), int(schema.get("maximum", schema.get("exclusiveMaximum", low + 10) - 1)))
        case "boolean":
            return rng.random() < 0.5
        case "null":
            return None
        case _:
            return rng.choice(list(words))
