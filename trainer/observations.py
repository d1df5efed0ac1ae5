"""Which observation tokens a model may learn to predict: what the environment sent in answer to a call, as it sent it.

Never the scaffold that the chat template puts around it, never what a system or a user says, never a message of the
platform's own (a call that could not be read, or was denied). A token counts in the first sample that shows it, and one
that was taken over from a parent episode counts there. Where a turn's tokens do not tell what of them is content, none
is taken. Which tokens are content is the renderer's knowledge, and comes from outside.
"""

from collections.abc import Callable, Mapping
from typing import TypeAlias

import numpy as np

from headrace.platform.records.arrays import U8
from headrace.platform.records.episode import Episode
from headrace.platform.records.status import Role, Status
from headrace.platform.records.turn import Turn

Span: TypeAlias = tuple[int, int]
ContentSpan: TypeAlias = Callable[[Turn, Turn], Span | None]
"""(an observation, the policy's turn before it) to the tokens of the observation that are its content, half-open; None
where that cannot be told."""


def observation_spans(episode: Episode, content: ContentSpan) -> dict[int, Span]:
    """The tokens that may be learned, by turn."""
    found: dict[int, Span] = {}
    for index, turn in enumerate(episode.turns[1:], 1):
        before = episode.turns[index - 1]
        if index >= episode.inherited_turns and _answers(turn, before) and (span := content(turn, before)) is not None:
            found[index] = span
    return found


def observation_mask(spans: Mapping[int, Span], turns: list[int], lengths: list[int]) -> U8:
    """u8[T] of a sample that shows `turns` of these lengths: 1 on the tokens of `spans`."""
    masks = [np.zeros(length, np.uint8) for length in lengths]
    for index, mask in zip(turns, masks, strict=True):
        if index in spans:
            mask[slice(*spans[index])] = 1
    whole: U8 = np.concatenate(masks)
    whole[:1] = 0
    return whole


def _answers(turn: Turn, before: Turn) -> bool:
    """Whether the environment wrote `turn` itself, as the one answer to one call that was let through."""
    calls = before.tool_calls
    return (
        turn.role is Role.TOOL
        and turn.status is Status.OK
        and before.is_action
        and len(calls) == 1
        and calls[0].decision == "allow"
    )
