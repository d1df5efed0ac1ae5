"""Thoughts in `<think>` tags before what is said, for any format."""

import msgspec

from headrace.actors.rendering.tool_formats.base import ToolFormat
from headrace.platform.contracts import ParsedMessage


class Thoughts:
    """Takes a thought off the front of a turn and leaves the rest to `said`.

    A thought that is opened and not closed goes on to the end, whatever it mentions (case X2).

    Args:
        said: reads what follows the thought.
        opened: whether the prompt has opened the thought already.
    """

    def __init__(self, said: ToolFormat, opened: bool) -> None:
        self._said = said
        self._opened = opened
        self.signature = f"{said.signature} after {'an opened thought' if opened else 'a thought'}"

    def parse(self, text: str) -> ParsedMessage:
        """See `ToolFormat.parse`."""
        head, closed, tail = text.partition("</think>")
        if not (closed or self._opened or head.lstrip().startswith("<think>")):
            return self._said.parse(text)
        reasoning = head.strip().removeprefix("<think>").strip()
        return msgspec.structs.replace(self._said.parse(tail), reasoning=reasoning)
