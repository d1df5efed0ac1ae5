"""Requests to the door by what they ask: prompts as token ids, and whether something was asked before."""

import hashlib
from collections.abc import Callable
from dataclasses import asdict, dataclass

import msgspec
import numpy as np

from headrace.platform.contracts import Asked, RefusalCode, Renderer
from headrace.platform.errors import ConfigError, DoorRefused
from headrace.platform.records.arrays import I32
from headrace.platform.records.status import Role

Encode = Callable[[str], list[int]]
"""A text to token ids, special tokens as they are written."""
_encode = msgspec.json.Encoder(order="deterministic").encode


@dataclass(frozen=True, kw_only=True, slots=True)
class Language:
    """How the policy is talked to: in messages, in texts, and in ids below `vocabulary`."""

    renderer: Renderer
    encode: Encode
    vocabulary: int

    def prompt(self, asked: Asked) -> I32:
        """The whole prompt as ids, i32[P]. Raises DoorRefused for what cannot be rendered."""
        if asked.prompt is not None:
            ids = self.encode(asked.prompt) if isinstance(asked.prompt, str) else asked.prompt
            if not len(ids):
                raise DoorRefused("the prompt is empty", RefusalCode.INVALID, "prompt")
            if max(ids) >= self.vocabulary:
                told = f"{max(ids)} is no token id of this model; they go up to {self.vocabulary - 1}"
                raise DoorRefused(told, RefusalCode.INVALID, "prompt")
            return np.array(ids, np.int32)
        check_messages(asked)
        try:
            return np.array(self.renderer.render(asked.messages, asked.tools), np.int32)
        except ConfigError as error:
            raise DoorRefused(str(error), RefusalCode.INVALID, "messages") from error


def check_messages(asked: Asked) -> None:
    """Raises DoorRefused for a conversation that the assistant cannot go on with."""
    if not asked.messages:
        raise DoorRefused("there is no message", RefusalCode.INVALID, "messages")
    if asked.messages[-1].role is Role.ASSISTANT:
        told = "the last message is the assistant's; it must be somebody else's"
        raise DoorRefused(told, RefusalCode.INVALID, "messages")


def fingerprint(asked: Asked) -> str:
    """The same for requests that ask for the same."""
    content = [list(asked.messages), list(asked.tools), asked.prompt, asdict(asked.sampling), asked.model]
    return hashlib.blake2b(_encode(content), digest_size=16).hexdigest()
