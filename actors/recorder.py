"""Turns an episode's events into its record: arrays, masks, hashes, costs. Decides nothing."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headrace.actors.plan import Ending, EpisodePlan
from headrace.platform.contracts import ParsedMessage
from headrace.platform.hashing import hash_text
from headrace.platform.records.arrays import F32, I32, U8
from headrace.platform.records.episode import Episode, Stamps
from headrace.platform.records.generation import Generation, SamplingParams
from headrace.platform.records.message import (
    Cost,
    HashPair,
    Message,
    Observation,
    RewardComponent,
    StepResult,
    ToolCall,
)
from headrace.platform.records.status import ActionKind, Role, Status, StopReason
from headrace.platform.records.tables import RewardRow
from headrace.platform.records.turn import ToolCallRecord, Turn, View

_ONES: U8 = np.ones(65536, dtype=np.uint8)
_ZEROS: U8 = np.zeros(65536, dtype=np.uint8)
_NO_LOGPROBS: F32 = np.zeros(65536, dtype=np.float32)
for _constant in (_ONES, _ZEROS, _NO_LOGPROBS):
    _constant.flags.writeable = False


def _constant_u8(source: U8, length: int) -> U8:
    """A read-only array of `length` equal values; short ones share memory, of which an episode holds many."""
    return source[:length] if length <= source.size else np.full(length, source[0], dtype=np.uint8)


def _no_logprobs(length: int) -> F32:
    return _NO_LOGPROBS[:length] if length <= _NO_LOGPROBS.size else np.zeros(length, dtype=np.float32)


@dataclass(slots=True)
class _Sampled:
    """A turn of the policy between sampling and the world's answer."""

    generation: Generation
    said: ParsedMessage
    view: View
    key: str
    sampling: SamplingParams
    seed: int
    started_s: float
    sampled_s: float


@dataclass(kw_only=True, slots=True)
class Recorder:
    """What has happened so far. `turns`, `views` and `rewards` are what the episode will hold."""

    episode_id: str
    turns: list[Turn] = field(default_factory=list)
    views: list[View] = field(default_factory=list)
    rewards: list[RewardRow] = field(default_factory=list)
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    tools_called: int = 0
    tool_s: float = 0.0
    money: float = 0.0
    state_hash: HashPair = field(default_factory=HashPair)
    policy_turns: int = 0
    _pending: "_Sampled | None" = None

    def prompt(self, observation: Observation, token_ids: Sequence[int]) -> None:
        """The opening messages, as one turn without actions."""
        text = joined_text(observation.messages)
        self.state_hash = observation.state_hash
        self._passive(Role.USER, text, token_ids, 0, metadata=observation.metadata)

    def observation(self, result: StepResult, token_ids: Sequence[int], segment: int, tool_turn: bool) -> None:
        """The world's answer to the turn before, scaffold and assistant header included."""
        messages = result.messages
        text = joined_text(messages)
        call_id = messages[0].tool_call_id if messages else ""
        role = Role.TOOL if tool_turn else Role.USER
        self._passive(
            role, text, token_ids, segment, tool_call_id=call_id, status=result.status, metadata=result.metadata
        )

    def sampled(
        self,
        generation: Generation,
        said: ParsedMessage,
        *,
        view: View,
        key: str,
        sampling: SamplingParams,
        seed: int,
        prompt_tokens: int,
        started_s: float,
        sampled_s: float,
    ) -> None:
        """The policy has sampled a turn; `stepped` completes it. Times are seconds since the episode began."""
        self._pending = _Sampled(generation, said, view, key, sampling, seed, started_s, sampled_s)
        self.prompt_tokens += prompt_tokens
        self.sampled_tokens += len(generation.token_ids)
        self.policy_turns += 1

    def stepped(self, result: StepResult | None, status: Status, ended_s: float) -> None:
        """The turn has been acted on. `result` is None where it never reached the world, or the world broke."""
        turn, self._pending = self._pending, None
        if turn is None:
            return
        tools_used = result.cost.tool_calls if result is not None else 0
        tool_s = ended_s - turn.sampled_s if tools_used else 0.0
        generation, said = turn.generation, turn.said
        length = len(generation.token_ids)
        if result is None:
            kind = ActionKind.NONE
        else:
            kind = ActionKind.TOOL if said.tool_calls else ActionKind.TEXT
            self.state_hash = result.state_hash
            self.tools_called += tools_used
            self.tool_s += tool_s
            self.money += result.cost.money
            if result.rewards:
                self.reward(result.rewards, turn=len(self.turns))
        self.turns.append(
            Turn(
                role=Role.ASSISTANT,
                token_ids=generation.token_ids,
                action_mask=_constant_u8(_ONES, length),
                behaviour_logprobs=generation.logprobs,
                segment=turn.view.segment,
                content=said.content,
                reasoning=said.reasoning,
                version_spans=generation.version_spans,
                sampling=turn.sampling,
                seed=turn.seed,
                finish_reason=generation.finish_reason,
                engine_build=generation.engine_build,
                replica=generation.replica,
                action_kind=kind,
                tool_calls=_call_records(turn, ended_s, status) if said.tool_calls else (),
                state_hash=self.state_hash,
                status=status,
                cost=Cost(0, length, tools_used, tool_s),
                started_s=turn.started_s,
                ended_s=ended_s,
            )
        )
        self.views.append(turn.view)

    def reward(
        self, components: Sequence[RewardComponent], *, turn: int | None = None, grader_version: str = ""
    ) -> None:
        """Rows for `components`, of one turn or of the whole episode."""
        for component in components:
            self.rewards.append(
                RewardRow(
                    episode_id=self.episode_id,
                    kind=component.kind,
                    value=component.value if component.valid else None,
                    valid=component.valid,
                    turn=turn,
                    grader_version=grader_version,
                    evidence=component.evidence,
                )
            )

    def score(self) -> float | None:
        """The sum of the valid components, None when any component is invalid: failure is never a reward."""
        if any(not row.valid for row in self.rewards):
            return None
        return float(sum(row.value or 0.0 for row in self.rewards))

    def episode(
        self, plan: EpisodePlan, environment: str, environment_version: str, ending: Ending, duration_s: float
    ) -> Episode:
        """The finished record. What was sampled before a fault is part of it."""
        self.stepped(None, ending.status, duration_s)
        spans = (span.version for turn in self.turns for span in turn.version_spans)
        first_token_s = next((turn.ended_s for turn in self.turns if turn.role is Role.ASSISTANT), duration_s)
        return Episode(
            attempt_id=plan.attempt_id,
            task=plan.task,
            environment=environment,
            environment_version=environment_version,
            seed=plan.seed,
            version=next(spans, plan.version),
            turns=tuple(self.turns),
            views=tuple(self.views),
            status=ending.status,
            stop_reason=ending.stop_reason,
            terminated=ending.stop_reason is StopReason.TERMINATED,
            truncated=ending.status.is_truncated,
            fault_owner=ending.owner,
            fault=ending.fault,
            update_mode=plan.update_mode,
            budgets=plan.budgets,
            digests=plan.digests,
            final_state_hash=self.state_hash.canonical,
            cost=Cost(self.prompt_tokens, self.sampled_tokens, self.tools_called, self.tool_s, self.money),
            stamps=Stamps(
                dispatched_s=plan.dispatched_s,
                first_token_s=plan.dispatched_s + first_token_s,
                done_s=plan.dispatched_s + duration_s,
            ),
            duration_s=duration_s,
            worker_id=plan.worker_id,
        )

    def _passive(
        self,
        role: Role,
        text: str,
        token_ids: Sequence[int],
        segment: int,
        *,
        tool_call_id: str = "",
        status: Status = Status.OK,
        metadata: dict[str, Any] | None = None,
    ) -> None:
        """A turn that the policy did not sample: mask 0 throughout (cases T6, T7)."""
        ids: I32 = np.array(token_ids, dtype=np.int32)
        self.turns.append(
            Turn(
                role=role,
                token_ids=ids,
                action_mask=_constant_u8(_ZEROS, ids.size),
                behaviour_logprobs=_no_logprobs(ids.size),
                segment=segment,
                content=text,
                tool_call_id=tool_call_id,
                observation_hash=hash_text(text),
                state_hash=self.state_hash,
                status=status,
                metadata=metadata or {},
            )
        )


def _call_records(turn: _Sampled, ended_s: float, status: Status) -> tuple[ToolCallRecord, ...]:
    return tuple(
        ToolCallRecord(
            index=index,
            call_id=call.call_id,
            name=call.name,
            arguments=call.arguments,
            key=turn.key,
            start_s=turn.sampled_s,
            end_s=ended_s,
            status=status,
        )
        for index, call in enumerate(turn.said.tool_calls)
    )


def joined_text(messages: Sequence[Message]) -> str:
    """Several messages as the one text that a turn records and hashes."""
    return messages[0].content if len(messages) == 1 else "\n".join(message.content for message in messages)


def as_step_message(turn: Turn) -> Message:
    """The message that an action turn gave to the environment: what a replay gives it again."""
    calls = tuple(ToolCall(record.name, record.arguments, record.call_id) for record in turn.tool_calls)
    return Message(Role.ASSISTANT, turn.content, turn.reasoning, calls)
