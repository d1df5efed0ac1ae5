"""What the public door offers to programs that speak OpenAI's API, without the HTTP.

`serving/openai` turns requests into these records and answers back into JSON; `actors/harness` converses. Neither knows
the other.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from headrace.platform.records.arrays import F32, I32
from headrace.platform.records.message import Message, ToolSpec
from headrace.platform.records.versions import VersionRef

REWARD_NAMES = ("reward", "rewards", "score")
"""What a client may not say of an episode: rewards come from its registered scorer."""


class RefusalCode(StrEnum):
    """Why the door refuses; each is one HTTP status."""

    INVALID = "invalid_request"
    UNKNOWN = "not_found"
    CONFLICT = "conflict"
    OVER = "episode_over"
    FULL = "no_room"
    AWAY = "pool_away"


@dataclass(frozen=True, kw_only=True, slots=True)
class AskedSampling:
    """How a client wants it sampled; None where it did not say. `stop` are texts that end an answer."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """One request: a conversation to go on with, or where `prompt` is not None a text or token ids.

    `retry_key` is what the client calls the request, so that it can ask for the same again; `is_retry` is its word that
    it has asked before.
    """

    messages: tuple[Message, ...] = ()
    tools: tuple[ToolSpec, ...] = ()
    prompt: str | tuple[int, ...] | None = None
    sampling: AskedSampling = field(default_factory=AskedSampling)
    model: str = ""
    retry_key: str = ""
    is_retry: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Answered:
    """What was sampled, as the client is told it.

    `message` has the content cut at a stop text, and calls with ids. `prompt_token_ids` i32[P] and `token_ids` i32[L]
    are what the model saw and sampled, whole; `logprobs` f32[L] are of the distribution sampled from, and `texts` the
    L tokens as text. `finish_reason` is "stop", "length" or "tool_calls". `version` is that of the last token.
    """

    message: Message
    prompt_token_ids: I32
    token_ids: I32
    logprobs: F32
    texts: tuple[str, ...]
    finish_reason: str
    version: VersionRef


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenedEpisode:
    """An episode that a client has taken: its id at this door, what the task says, and how long it may last."""

    episode: str
    messages: tuple[Message, ...]
    metadata: Mapping[str, Any]
    deadline_s: float
    max_turns: int
    max_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedEpisode:
    """How an episode ended. Its rewards are not the client's business."""

    episode: str
    status: str
    stop_reason: str
    turns: int
    sampled_tokens: int
    segments_opened: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DoorState:
    """What the door stands on: the policy's name, the versions that can be asked for, and its episodes."""

    model: str
    versions: Sequence[int]
    draining: bool = False
    open_episodes: int = 0
    waiting_episodes: int = 0

    @property
    def newest(self) -> int | None:
        """The newest version, None while there is none."""
        return max(self.versions, default=None)


class Conversations(Protocol):
    """Answers clients. Every method raises DoorRefused for what it does not do; `answer` also EngineError and
    DeadlineExceeded."""

    async def answer(self, asked: Asked, episode: str = "") -> Answered:
        """Sample an answer: for the record of `episode`, or where that is empty for nobody's.

        In an episode, what has been asked before is not sampled again (P24): the same request while nothing has gone on
        from its answer or where it says that it is a retry, and the same key always; a key of another request is a
        CONFLICT. Cancelling the call cancels nothing there: the client may come back for it.
        """

    async def open(self, wait_s: float) -> OpenedEpisode:
        """Take the episode that has been waiting longest; waits up to `wait_s` seconds for one, and is FULL without."""

    async def finish(self, episode: str, info: Mapping[str, Any]) -> FinishedEpisode:
        """The client is done. `info` is shown to the scorer as evidence; one with a reward is INVALID, and the episode
        goes on. Again it gives the same answer, whatever is said. What is asked of an episode that is over is OVER."""

    async def abandon(self, episode: str, reason: str) -> None:
        """The client gives the episode up: it has no reward, and its slot gets another try. Safe where it is over."""

    def state(self) -> DoorState:
        """As of now."""
