"""The way in for harnesses: `Conversations` over one policy.

Owns who has which episode. Episodes are offered here by `play.py`, oldest first; whoever opens one gets an id that
nobody can guess and that is good for this episode alone. What is said without an episode is sampled and forgotten.
"""

import asyncio
import secrets
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from headrace.actors.harness.asking import Language
from headrace.actors.harness.recorded import HarnessEpisode
from headrace.actors.harness.unrecorded import UnrecordedAnswers
from headrace.actors.plan import Ending, PlayedEpisode
from headrace.platform.contracts import (
    Answered,
    Asked,
    DoorState,
    FinishedEpisode,
    OpenedEpisode,
    RefusalCode,
    TokenGenerator,
)
from headrace.platform.contracts.doors import REWARD_NAMES
from headrace.platform.errors import DoorRefused
from headrace.platform.records.status import FaultOwner, Status, StopReason

_REMEMBERED = 1024  # episodes that are over, for clients that ask again
_MOST_INFO = 1 << 20  # bytes


@dataclass(slots=True)
class Offer:
    """An episode that waits for a harness, or has one. `taken` is set when somebody opens it; `ended` when it is
    recorded."""

    episode: HarnessEpisode
    name: str = field(default_factory=lambda: f"ep-{secrets.token_hex(12)}")
    taken: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class HarnessDoor:
    """`Conversations`. Belongs to one event loop.

    Args:
        model: what clients know the policy as.
        versions: those that can be sampled from now.
        max_tokens: the longest context of what is no episode.
        deadline_s: how long one generation of what is no episode may take.
        finish_s: how long `finish` waits for the record of the episode.
    """

    def __init__(
        self,
        language: Language,
        generator: TokenGenerator,
        model: str,
        versions: Callable[[], Sequence[int]],
        *,
        max_tokens: int,
        deadline_s: float,
        finish_s: float = 60.0,
    ) -> None:
        self.language = language
        self._model, self._versions, self._finish_s = model, versions, finish_s
        self._unrecorded = UnrecordedAnswers(language, generator, model, versions, max_tokens, deadline_s)
        self._waiting: deque[Offer] = deque()
        self._open: dict[str, Offer] = {}
        self._over: OrderedDict[str, FinishedEpisode | None] = OrderedDict()
        self._offered = asyncio.Event()
        self.is_draining = False

    # --- for clients --------------------------------------------------------------------------------------------------

    async def answer(self, asked: Asked, episode: str = "") -> Answered:
        """See `Conversations.answer`."""
        if not episode:
            self._check_open()
            return await self._unrecorded.answer(asked)
        return await self._episode(episode).episode.answer(asked)

    async def open(self, wait_s: float) -> OpenedEpisode:
        """See `Conversations.open`."""
        self._check_open()
        try:
            async with asyncio.timeout(wait_s):
                while not self._waiting:
                    self._offered.clear()
                    await self._offered.wait()
                    self._check_open()
        except TimeoutError:
            told = "no episode waits for a harness now; ask again"
            raise DoorRefused(told, RefusalCode.FULL) from None
        return self.take(self._waiting[0])

    async def finish(self, episode: str, info: Mapping[str, Any]) -> FinishedEpisode:
        """See `Conversations.finish`."""
        if episode not in self._over:
            offer = self._episode(episode)
            if not offer.episode.over.done():
                offer.episode.info.update(_checked(info))
                offer.episode.end(_finished(offer.episode))
            try:
                async with asyncio.timeout(self._finish_s):
                    await offer.ended.wait()
            except TimeoutError:
                raise DoorRefused("the episode is over, but not recorded yet; ask again", RefusalCode.AWAY) from None
        summary = self._over.get(episode)
        if summary is None:
            raise DoorRefused("the episode was cancelled", RefusalCode.OVER)
        return summary

    async def abandon(self, episode: str, reason: str) -> None:
        """See `Conversations.abandon`."""
        if episode in self._over:
            return
        told = f"the harness gave the episode up{': ' if reason else ''}{reason}"
        self._episode(episode).episode.end(_fault(told))

    def state(self) -> DoorState:
        """See `Conversations.state`."""
        return DoorState(
            model=self._model,
            versions=sorted(self._versions()),
            draining=self.is_draining,
            open_episodes=len(self._open),
            waiting_episodes=len(self._waiting),
        )

    # --- for whoever plays --------------------------------------------------------------------------------------------

    def begin_drain(self) -> None:
        """Begin nothing new, and send away who waits. Episodes that are open go on."""
        self.is_draining = True
        self._offered.set()

    def offer(self, episode: HarnessEpisode) -> Offer:
        """Offer an episode to whoever comes; `withdraw` it when it is over, in any case."""
        offer = Offer(episode)
        self._waiting.append(offer)
        self._offered.set()
        return offer

    def take(self, offer: Offer) -> OpenedEpisode:
        """Give an offered episode to a harness."""
        self._waiting.remove(offer)
        self._open[offer.name] = offer
        offer.taken.set()
        plan, opening = offer.episode.plan, offer.episode.opening
        return OpenedEpisode(
            episode=offer.name,
            messages=opening.messages,
            metadata=opening.metadata,
            deadline_s=plan.budgets.max_seconds,
            max_turns=plan.budgets.max_turns,
            max_tokens=plan.budgets.max_tokens,
        )

    def withdraw(self, offer: Offer, played: PlayedEpisode | None = None) -> None:
        """The episode is over; `played` is None where it was cancelled."""
        if offer in self._waiting:
            self._waiting.remove(offer)
        self._open.pop(offer.name, None)
        if offer.taken.is_set():
            self._over[offer.name] = None if played is None else _summary(offer, played)
            while len(self._over) > _REMEMBERED:
                self._over.popitem(last=False)
        offer.ended.set()

    def _episode(self, name: str) -> Offer:
        if name in self._over:
            raise DoorRefused("the episode is over", RefusalCode.OVER)
        if name not in self._open:
            raise DoorRefused(f"there is no episode {name!a:.40} here", RefusalCode.UNKNOWN)
        return self._open[name]

    def _check_open(self) -> None:
        if self.is_draining:
            raise DoorRefused("the door is closing and begins nothing new", RefusalCode.AWAY)


def _summary(offer: Offer, played: PlayedEpisode) -> FinishedEpisode:
    episode = played.episode
    return FinishedEpisode(
        episode=offer.name,
        status=episode.status,
        stop_reason=episode.stop_reason,
        turns=len(episode.views),
        sampled_tokens=episode.cost.sampled_tokens,
        segments_opened=offer.episode.segments_opened,
    )


def _finished(episode: HarnessEpisode) -> Ending:
    """What a harness that says it is done has done."""
    if not episode.recorder.policy_turns:  # whoever never spoke cannot be judged
        return _fault("the harness finished without an answer of the policy")
    return Ending(StopReason.TERMINATED)


def _fault(cause: str) -> Ending:
    return Ending(StopReason.FAULT, Status.ENV_TRANSIENT, FaultOwner.ENVIRONMENT, cause)


def _checked(info: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a harness may say of an episode. Raises DoorRefused: rewards are the scorer's alone."""
    for key in REWARD_NAMES:
        if key in info:
            told = (
                f"{key!r} is refused: a reward comes from the environment's registered scorer, never from the harness"
            )
            raise DoorRefused(told, RefusalCode.INVALID, key)
    try:
        size = len(msgspec.msgpack.encode(info))
    except (TypeError, ValueError, OverflowError) as error:
        raise DoorRefused(f"info cannot be stored: {error}", RefusalCode.INVALID, "info") from error
    if size > _MOST_INFO:
        told = f"info has {size} bytes; at most {_MOST_INFO} are kept"
        raise DoorRefused(told, RefusalCode.INVALID, "info")
    return info
