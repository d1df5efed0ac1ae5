"""Text that every part takes: a lone surrogate is no text, and neither tokenizer nor store accepts one (case X10)."""

from collections.abc import Sequence

import msgspec

from headrace.platform.records.message import Message


def well_formed_text(text: str) -> str:
    """`text` with every lone surrogate replaced by "?", which is also what `hash_text` takes it for."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def well_formed(messages: Sequence[Message]) -> Sequence[Message]:
    """`messages` with well-formed contents and call ids."""
    for message in messages:
        if not (message.content.isascii() and message.tool_call_id.isascii()):
            break
    else:
        return messages
    return [
        msgspec.structs.replace(
            message,
            content=well_formed_text(message.content),
            tool_call_id=well_formed_text(message.tool_call_id),
        )
        for message in messages
    ]
