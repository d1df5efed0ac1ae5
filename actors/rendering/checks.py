"""What a model's prompts can hold, found out when its renderer is loaded.

Each probe is a conversation that agents have, and texts that its prompt must show. A template that cannot render a
user's message is of no use. One that refuses a role, or leaves something out, is taken as it is: a refusal is raised
again where a conversation needs it, and what is left out was left out on purpose, as tools that a model knows by heart.
"""

from collections.abc import Mapping, Sequence

from headrace.platform.contracts import Renderer
from headrace.platform.errors import ConfigError
from headrace.platform.records.message import Message, ToolCall, ToolSpec
from headrace.platform.records.status import Role

PLAIN = "a user's message"
USER, SYSTEM = Message(Role.USER, "question"), Message(Role.SYSTEM, "instruction")
TOOL = ToolSpec("find", "Look up", {"type": "object", "properties": {"key": {"type": "string"}}})
THOUGHT = "ponder"


def _call(number: int) -> ToolCall:
    return ToolCall("find", {"key": f"value{number}"}, f"call0000{number}")  # some templates want nine characters


def _result(number: int) -> Message:
    return Message(Role.TOOL, f"result{number}", tool_call_id=f"call0000{number}")


ONE_CALL = Message(Role.ASSISTANT, tool_calls=(_call(1),))
TWO_CALLS = Message(Role.ASSISTANT, tool_calls=(_call(1), _call(2)))
CONVERSATIONS: Mapping[str, tuple[Sequence[Message], Sequence[ToolSpec], Sequence[str]]] = {
    PLAIN: ((USER,), (), ("question",)),
    "a system message": ((SYSTEM, USER), (), ("instruction", "question")),
    "tools in the prompt": ((USER,), (TOOL,), ("find", "key")),
    "a tool call and its result": ((USER, ONE_CALL, _result(1)), (TOOL,), ("value1", "result1")),
    "two parallel calls and their results": (
        (USER, TWO_CALLS, _result(1), _result(2)),
        (TOOL,),
        ("value1", "value2", "result1", "result2"),
    ),
    "a thought": (
        (USER, Message(Role.ASSISTANT, reasoning=THOUGHT, tool_calls=(_call(1),)), _result(1)),
        (TOOL,),
        (THOUGHT,),
    ),
}


def what_it_cannot_do(renderer: Renderer) -> dict[str, str]:
    """Probe to cause, for those that are refused or not shown.

    Raises:
        ConfigError: when it cannot render a user's message.
    """
    limits: dict[str, str] = {}
    for name, (messages, tools, texts) in CONVERSATIONS.items():
        try:
            shown = renderer.decode(renderer.render(messages, tools))
        except ConfigError as error:
            if name == PLAIN:
                raise
            limits[name] = str(error)
            continue
        if missing := [text for text in texts if text not in shown]:
            limits[name] = f"prompts do not show {', '.join(missing)}"
    return limits
