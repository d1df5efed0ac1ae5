"""One turn of an episode: the smallest thing that a replay compares and a loss is averaged over."""

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.platform.records.arrays import F32, I32, U8
from headrace.platform.records.generation import SamplingParams
from headrace.platform.records.message import ContentPart, Cost, HashPair, Message
from headrace.platform.records.status import ActionKind, FinishReason, Role, SideEffectTier, Status
from headrace.platform.records.versions import VersionSpan


class ToolCallRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """What became of one tool call. Times are seconds since the episode began."""

    index: int
    call_id: str
    name: str
    arguments: dict[str, Any] = {}
    key: str = ""
    parent: str = ""
    start_s: float = 0.0
    end_s: float = 0.0
    status: Status = Status.OK
    decision: str = "allow"
    rule: str = ""
    tier: SideEffectTier = SideEffectTier.READ
    source: str = ""
    taint: tuple[str, ...] = ()
    in_doubt: bool = False
    result_hash: str = ""
    result_span: tuple[int, int] | None = None


class TokenColumn(msgspec.Struct, frozen=True, gc=False):
    """A named per-token array that someone added: critic values, reference logprobs, entropy, router choices.

    `values` is i32 or f32 and has the turn's length; where `alignment` is "action", it is meaningful only where the
    action mask is 1.
    """

    values: npt.NDArray[Any]
    alignment: str
    producer: str


class Turn(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One message as tokens, with everything needed to train on it, replay it and blame someone for it.

    The three arrays have one length L. `action_mask` is 1 exactly where the policy sampled the token and is never
    changed afterwards; `behaviour_logprobs` is 0 where the mask is 0. `version_spans` index into the turn's tokens.
    A turn that is not the policy's has mask 0 throughout and no spans.
    """

    role: Role
    token_ids: I32
    action_mask: U8
    behaviour_logprobs: F32
    agent_id: str = ""
    segment: int = 0
    content: str = ""
    reasoning: str = ""
    parts: tuple[ContentPart, ...] = ()
    version_spans: tuple[VersionSpan, ...] = ()
    sampling: SamplingParams | None = None
    seed: int = 0
    finish_reason: FinishReason | None = None
    engine_build: str = ""
    replica: str = ""
    grammar_digest: str = ""
    action_kind: ActionKind = ActionKind.NONE
    tool_calls: tuple[ToolCallRecord, ...] = ()
    tool_call_id: str = ""
    observation_hash: HashPair = HashPair()
    state_hash: HashPair = HashPair()
    taint: str = ""
    status: Status = Status.OK
    cost: Cost = Cost()
    started_s: float = 0.0
    ended_s: float = 0.0
    token_columns: dict[str, TokenColumn] = {}
    metadata: dict[str, Any] = {}

    @property
    def is_action(self) -> bool:
        """The policy sampled at least one token of this turn."""
        return bool(np.any(self.action_mask))

    @property
    def oldest_version(self) -> int | None:
        """The lowest version number over the action tokens, None where there are none."""
        return min((span.version.number for span in self.version_spans), default=None)

    def as_message(self) -> Message:
        """The turn as a message, for reading; training never goes back from text to tokens."""
        return Message(self.role, self.content, self.reasoning, tool_call_id=self.tool_call_id, parts=self.parts)


class View(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What the model saw when it sampled turn `turn`.

    `spans` are half-open ranges of turn indices, in the order shown. `segment` counts contexts that are not an exact
    extension of the one before (docs/design.md section 6.5); `dropped_hash` covers what the strategy left out.
    """

    turn: int
    spans: tuple[tuple[int, int], ...]
    segment: int = 0
    strategy: str = "append"
    strategy_version: str = "1"
    dropped_hash: str = ""
