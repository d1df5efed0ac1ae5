"""Conversations that say what they are told to: no policy, no record of what was said, no waiting.

Owns which episodes are open, and what was asked in them: of the promises of `Conversations` it keeps all but that
nothing is ever encoded again, for characters are its tokens.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np

from headrace.platform.contracts import Answered, Asked, DoorState, FinishedEpisode, OpenedEpisode, RefusalCode
from headrace.platform.contracts.doors import REWARD_NAMES
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
        self._open: dict[str, list[tuple[Asked, Answered]]] = {}
        self._over: dict[str, FinishedEpisode] = {}
        self.info: dict[str, Mapping[str, Any]] = {}
        """What clients said of the episodes that they finished."""

    async def answer(self, asked: Asked, episode: str = "") -> Answered:
        """See `Conversations.answer`."""
        if not episode:
            return self._answered(asked)
        self._check(episode)
        known = _known(asked, self._open[episode])
        if known is None:
            known = self._answered(asked)
            self._open[episode].append((asked, known))
        return known

    async def open(self, wait_s: float) -> OpenedEpisode:
        """See `Conversations.open`; does not wait."""
        if not self._waiting:
            raise DoorRefused("no episode waits", RefusalCode.FULL)
        opened = self._waiting.popleft()
        self._open[opened.episode] = []
        return opened

    async def finish(self, episode: str, info: Mapping[str, Any]) -> FinishedEpisode:
        """See `Conversations.finish`."""
        if episode not in self._over:
            self._check(episode)
            for name in REWARD_NAMES:
                if name in info:
                    raise DoorRefused(f"{name!r} is the scorer's", RefusalCode.INVALID, name)
            self.info[episode] = info
            self._end(episode, Status.OK, StopReason.TERMINATED)
        return self._over[episode]

    async def abandon(self, episode: str, reason: str) -> None:
        """See `Conversations.abandon`."""
        if episode not in self._over:
            self._check(episode)
            self._end(episode, Status.ENV_TRANSIENT, StopReason.FAULT)

    def state(self) -> DoorState:
        """See `Conversations.state`."""
        return DoorState(
            model=self._model, versions=(0,), open_episodes=len(self._open), waiting_episodes=len(self._waiting)
        )

    def _answered(self, asked: Asked) -> Answered:
        text = self._replies(asked)
        sampled = text[: asked.sampling.max_tokens]
        ends = [sampled.find(stop) for stop in asked.sampling.stop if stop and stop in sampled]
        prompt = asked.prompt if asked.prompt is not None else "".join(message.content for message in asked.messages)
        return Answered(
            message=Message(Role.ASSISTANT, sampled[: min(ends, default=None)]),
            prompt_token_ids=np.array([ord(each) if isinstance(each, str) else each for each in prompt], np.int32),
            token_ids=np.array([ord(char) for char in sampled], np.int32),
            logprobs=np.full(len(sampled), SCRIPTED_LOGPROB, np.float32),
            texts=tuple(sampled),
            finish_reason="stop" if ends or sampled == text else "length",
            version=VersionRef(self._model, 0),
        )

    def _end(self, episode: str, status: Status, reason: StopReason) -> None:
        answers = [answer for _, answer in self._open.pop(episode)]
        self._over[episode] = FinishedEpisode(
            episode=episode,
            status=status,
            stop_reason=reason,
            turns=len(answers),
            sampled_tokens=sum(len(answer.token_ids) for answer in answers),
            segments_opened=0,
        )

    def _check(self, episode: str) -> None:
        if episode in self._over:
            raise DoorRefused("the episode is over", RefusalCode.OVER)
        if episode not in self._open:
            raise DoorRefused(f"there is no episode {episode!a}", RefusalCode.UNKNOWN)


def _known(asked: Asked, answers: list[tuple[Asked, Answered]]) -> Answered | None:
    """The answer to the same request (P24): by its key, or by what it asks while nothing has gone on from there."""
    same = replace(asked, is_retry=False)
    for earlier, answer in reversed(answers):
        if earlier.retry_key != asked.retry_key:
            continue
        if replace(earlier, is_retry=False) != same:
            if asked.retry_key:
                raise DoorRefused("this key belongs to another request", RefusalCode.CONFLICT)
            continue
        told = (*earlier.messages, answer.message)
        is_gone_on_from = any(each.messages[: len(told)] == told for each, _ in answers)
        return answer if asked.retry_key or asked.is_retry or not is_gone_on_from else None
    return None
