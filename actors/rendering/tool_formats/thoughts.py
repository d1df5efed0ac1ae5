"""Thoughts in `<think>` tags around what is said, for any format."""

import re

import msgspec

from headrace.actors.rendering.tool_formats.base import TaggedFormat
from headrace.platform.contracts import ParsedMessage

_TAG = re.compile(r"</?think>")


class Thoughts:
    """Takes the thoughts out of a turn and leaves the rest to `said`.

    A thought that is opened and not closed goes on to the end, whatever it mentions (case X2). One that is closed and
    not opened began with the turn, as templates make it. Tags inside of a call's arguments belong to them.

    Args:
        said: reads what is said beside the thoughts.
        opened: whether the prompt has opened a thought already.
    """

    def __init__(self, said: TaggedFormat, opened: bool) -> None:
        self._said = said
        self._opened = opened
        self.signature = f"{said.signature} after {'an opened thought' if opened else 'a thought'}"

    def parse(self, text: str) -> ParsedMessage:
        """See `ToolFormat.parse`."""
        tags = self._tags(text)
        thinking = self._opened or (bool(tags) and tags[0][0] == "</think>")
        if not (tags or thinking):
            return self._said.parse(text)
        said, thoughts, position = "", list[str](), 0
        for tag in tags:
            if thinking == (tag[0] == "<think>"):
                continue  # a thought within a thought, or an end of none
            piece = text[position : tag.start()]
            if thinking:
                thoughts.append(piece)
            else:
                said += piece
            thinking, position = not thinking, tag.end()
        if thinking:
            thoughts.append(text[position:])
        else:
            said += text[position:]
        stripped = [thought.strip().removeprefix("<think>").strip() for thought in thoughts]
        return msgspec.structs.replace(self._said.parse(said), reasoning="\n".join(filter(None, stripped)))

    def _tags(self, text: str) -> list[re.Match[str]]:
        """The tags of thoughts, without those that calls quote."""
        tags = list(_TAG.finditer(text))
        quotes = list(self._said.quotes(text)) if tags else []
        return [tag for tag in tags if not any(start <= tag.start() < end for start, end in quotes)]
