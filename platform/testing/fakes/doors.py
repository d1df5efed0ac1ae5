"""Conversations that say what they are told to: no policy, no episode's record, no waiting.

Owns which episodes are open. What `Conversations` promises of retries and recording is the business of whoever keeps a
record; this keeps none.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import numpy as np

from headrace.platform.contracts import Answered, Asked, DoorState, FinishedEpisode, OpenedEpisode, RefusalCode
from headrace.platform.errors import DoorRefused
from headrace.platform.records.message import Message
from headrace.platform.records.status import Role, Status, StopReason
from headrace.platform.records.versions import VersionRef

SCRIPTED_LOGPROB = -0.5
Replies: TypeAlias = Callable[[Asked], str]


class ScriptedConversations:
    """A `Conversations` whose answers come from a function; every character is a token, its id the code point.

    Args:
        replies: the text for a request; may raise whatever an engine would.
        episodes: those that wait for a client, in order.
    """

    def __init__(self, replies: Replies, episodes: Iterable[OpenedEpisode] = (), model: str = "scripted") -> None:
        self._replies, self._model = replies, model
        self._waiting = deque(episodes)
        self._turns: dict[str, int] = {}
        self._over: dict[str, FinishedEpisode] = {}
        self.info: dict[str, Mapping[str, Any]] = {}
        """What clients said of the episodes that they finished."""

    async def answer(self, asked: Asked, episode: str = "") -> Answered:
        """See `Conversations.answer`."""
        if episode:
            self._check(episode)
        text = self._replies(asked)
        if episode:
            self._turns[episode] += 1
        prompt = "".join(message.content for message in asked.messages)
        ids = np.array([ord(char) for char in text], np.int32)
        return Answered(
            message=Message(Role.ASSISTANT, text),
            prompt_token_ids=np.array([ord(char) for char in prompt], np.int32),
            token_ids=ids,
            logprobs=np.full(len(ids), SCRIPTED_LOGPROB, np.float32),
            texts=tuple(text),
            finish_reason="stop",
            version=VersionRef(self._model, 0),
        )

    async def open(self, wait_s: float) -> OpenedEpisode:
        """See `Conversations.open`; does not wait."""
        if not self._waiting:
            raise DoorRefused("no episode waits", RefusalCode.FULL)
        opened = self._waiting.popleft()
        self._turns[opened.episode] = 0
        return opened

    async def finish(self, episode: str, info: Mapping[str, Any]) -> FinishedEpisode:
        """See `Conversations.finish`."""
        if episode not in self._over:
            self._check(episode)
            self.info[episode] = info
            self._over[episode] = FinishedEpisode(
                episode=episode,
                status=Status.OK,
                stop_reason=StopReason.TERMINATED,
                turns=self._turns.pop(episode),
                sampled_tokens=0,
                segments_opened=0,
            )
        return self._over[episode]

    async def abandon(self, episode: str, reason: str) -> None:
        """See `Conversations.abandon`."""
        self._check(episode)
        del self._turns[episode]

    def state(self) -> DoorState:
        """See `Conversations.state`."""
        return DoorState(
            model=self._model, versions=(0,), open_episodes=len(self._turns), waiting_episodes=len(self._waiting)
        )

    def _check(self, episode: str) -> None:
        if episode in self._over:
            raise DoorRefused("the episode is over", RefusalCode.OVER)
        if episode not in self._turns:
            raise DoorRefused(f"there is no episode {episode!a}", RefusalCode.UNKNOWN)
