"""Turns an episode's events into its record: arrays, masks, hashes, costs. Decides nothing."""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.actors.plan import Ending, EpisodePlan
from headrace.actors.text import well_formed_text
from headrace.platform.contracts import ParsedMessage
from headrace.platform.errors import EnvironmentFault
from headrace.platform.hashing import hash_text
from headrace.platform.records.arrays import F32, I32, U8
from headrace.platform.records.episode import Episode, Provenance, Stamps
from headrace.platform.records.generation import Generation, GenerationRequest
from headrace.platform.records.message import (
    CallOutcome,
    Cost,
    HashPair,
    Message,
    Observation,
    RewardComponent,
    StepResult,
    ToolCall,
    ToolSpec,
)
from headrace.platform.records.status import ActionKind, Role, Status, StopReason, UpdateMode
from headrace.platform.records.tables import RewardRow, score_of
from headrace.platform.records.turn import TokenColumn, ToolCallRecord, Turn, View

_INT32 = np.dtype(np.int32)
_SHARED_LENGTHS = 4096
# Looked up once: before Python 3.12 a member of an enum costs as much as a call, and these are for every turn.
_ASSISTANT, _TOOL, _USER = Role.ASSISTANT, Role.TOOL, Role.USER
_CALLS, _SPEAKS, _NOTHING_DONE = ActionKind.TOOL, ActionKind.TEXT, ActionKind.NONE
_STICKY = UpdateMode.STICKY
# What nearly every turn has none of. Records are not changed, so that they can share it.
_NO_COLUMNS: dict[str, TokenColumn] = {}
_NO_METADATA: dict[str, Any] = {}
_NO_OUTCOME = CallOutcome()


@functools.lru_cache(maxsize=_SHARED_LENGTHS)
def _sampled_mask(length: int) -> U8:
    """Ones, u8[length]. Equal columns of all turns are one read-only array: an episode holds dozens of them."""
    return _read_only(np.ones(length, dtype=np.uint8))


@functools.lru_cache(maxsize=_SHARED_LENGTHS)
def _given_columns(length: int) -> tuple[U8, F32]:
    """The mask and the logprobs of tokens that nobody sampled: zeros, u8[length] and f32[length]."""
    return _read_only(np.zeros(length, dtype=np.uint8)), _read_only(np.zeros(length, dtype=np.float32))


def _read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    array.flags.writeable = False
    return array


class _Sampled(msgspec.Struct, gc=False):
    """A turn of the policy between sampling and the world's answer. A Struct, for it is made at every turn."""

    request: GenerationRequest
    generation: Generation
    said: ParsedMessage
    view: View
    started_s: float
    sampled_s: float


@dataclass(kw_only=True, slots=True)
class Recorder:
    """What has happened so far. `turns`, `views` and `rewards` are what the episode will hold.

    `inherited` turns at the beginning are those of the episode that this one branches off.

    `newest_version` is that of all tokens so far, in the modes that move: the least that may sample the next ones, for
    versions never go back within an episode (P22). It begins as the planned version.
    """

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
    inherited: int = 0
    newest_version: int = -1
    tools: str = ""
    _pending: "_Sampled | None" = None

    def offered(self, tools: Sequence[ToolSpec]) -> None:
        """What the world lets the policy do. Raises EnvironmentFault where that is not JSON."""
        self.tools = tools_digest(tools)

    def take_up(self, turns: Sequence[Turn], views: Sequence[View], results: Mapping[int, StepResult]) -> None:
        """Begin with the turns of another episode, which have just been done again: `results` by turn. What they cost
        and earned is this episode's too."""
        self.turns += turns
        self.inherited = len(turns)
        self.views += views
        self.policy_turns = len(views)
        for view in views:
            self.prompt_tokens += sum(len(turn.token_ids) for span in view.spans for turn in turns[slice(*span)])
            cost = turns[view.turn].cost
            self.sampled_tokens += cost.sampled_tokens
            self.tools_called += cost.tool_calls
            self.tool_s += cost.tool_s
        for index, result in results.items():
            self.money += result.cost.money
            self.reward(result.rewards, turn=index)
        self.state_hash = turns[-1].state_hash

    def prompt(self, messages: Sequence[Message], observation: Observation, token_ids: I32 | Sequence[int]) -> None:
        """The opening messages, as one turn without actions."""
        self.state_hash = observation.state_hash
        self._given(_USER, messages, np.asarray(token_ids, _INT32), 0, observation.metadata)

    def observation(self, messages: Sequence[Message], result: StepResult, token_ids: I32, segment: int) -> None:
        """The world's answer to the turn before, as the model reads it: scaffold and assistant header included."""
        role = _TOOL if messages[0].role is _TOOL else _USER
        call_id = messages[0].tool_call_id
        self._given(role, messages, token_ids, segment, result.metadata, call_id, result.status, result.taint)

    def sampled(
        self,
        request: GenerationRequest,
        generation: Generation,
        said: ParsedMessage,
        view: View,
        started_s: float,
        sampled_s: float,
    ) -> None:
        """The policy has sampled a turn; `stepped` completes it. Times are seconds since the episode began."""
        self._pending = _Sampled(request, generation, said, view, started_s, sampled_s)
        self.prompt_tokens += len(request.token_ids)
        self.sampled_tokens += len(generation.token_ids)
        self.policy_turns += 1
        if request.update_mode is not _STICKY:
            self.newest_version = max(
                [self.newest_version, *(each.version.number for each in generation.version_spans)]
            )

    def stepped(self, result: StepResult | None, status: Status, ended_s: float) -> None:
        """The turn has been acted on. `result` is None where it never reached the world, or the world broke."""
        turn = self._pending
        if turn is None:
            return
        generation, said = turn.generation, turn.said
        tools_used, tool_s, kind = 0, 0.0, _NOTHING_DONE
        if result is not None:
            kind = _CALLS if said.tool_calls else _SPEAKS
            self.state_hash = result.state_hash
            self.money += result.cost.money
            if tools_used := result.cost.tool_calls:
                tool_s = ended_s - turn.sampled_s
                self.tools_called += tools_used
                self.tool_s += tool_s
            if result.rewards:
                self.reward(result.rewards, turn=len(self.turns))
        length = len(generation.token_ids)
        self.turns.append(
            Turn(
                role=_ASSISTANT,
                token_ids=generation.token_ids,
                action_mask=_sampled_mask(length),
                behaviour_logprobs=generation.logprobs,
                segment=turn.view.segment,
                content=said.content,
                reasoning=said.reasoning,
                version_spans=generation.version_spans,
                sampling=turn.request.sampling,
                seed=turn.request.seed,
                finish_reason=generation.finish_reason,
                engine_build=generation.engine_build,
                replica=generation.replica,
                action_kind=kind,
                tool_calls=_call_records(turn, ended_s, status, result) if said.tool_calls else (),
                state_hash=self.state_hash,
                status=status,
                cost=Cost(0, length, tools_used, tool_s),
                started_s=turn.started_s,
                ended_s=ended_s,
                token_columns=_NO_COLUMNS,
                metadata=_NO_METADATA,
            )
        )
        self.views.append(turn.view)
        self._pending = None

    def reward(
        self, components: Sequence[RewardComponent], *, turn: int | None = None, grader_version: str = ""
    ) -> None:
        """Rows for `components`, of one turn or of the whole episode. A value that is not finite is not valid."""
        for component in components:
            valid = component.valid and math.isfinite(component.value)
            self.rewards.append(
                RewardRow(
                    episode_id=self.episode_id,
                    kind=component.kind,
                    value=component.value if valid else None,
                    valid=valid,
                    turn=turn,
                    grader_version=grader_version,
                    evidence=well_formed_text(component.evidence),
                )
            )

    def score(self) -> float | None:
        """See `score_of`."""
        return score_of(self.rewards)

    @property
    def is_rewarded(self) -> bool:
        """Whether anything that counts for the score was said, valid or not."""
        return any(row.kind.is_reward for row in self.rewards)

    def episode(
        self,
        plan: EpisodePlan,
        environment: str,
        environment_version: str,
        provenance: Provenance,
        ending: Ending,
        duration_s: float,
    ) -> Episode:
        """The finished record. What was sampled before a fault is part of it."""
        self.stepped(None, ending.status, duration_s)
        planned = plan.version.number  # a span of another version stays visible to the fidelity gate
        sampled = (span.version for turn in self.turns for span in turn.version_spans)
        own = self.turns[self.inherited :]
        first_token_s = next((turn.ended_s for turn in own if turn.role is _ASSISTANT), duration_s)
        return Episode(
            attempt_id=plan.attempt_id,
            task=plan.task,
            environment=environment,
            environment_version=environment_version,
            seed=plan.seed,
            version=next((version for version in sampled if version.number == planned), plan.version),
            turns=tuple(self.turns),
            views=tuple(self.views),
            status=ending.status,
            stop_reason=ending.stop_reason,
            terminated=ending.stop_reason is StopReason.TERMINATED,
            truncated=ending.status.is_truncated,
            fault_owner=ending.owner,
            fault=ending.fault,
            parent_episode=plan.prefix.episode_id if plan.prefix is not None else "",
            branch_step=plan.branch_step,
            update_mode=plan.update_mode,
            budgets=plan.budgets,
            digests=msgspec.structs.replace(
                plan.digests, tool_schemas=self.tools, gateway_policy=provenance.gateway_policy
            ),
            final_state_hash=self.state_hash.canonical,
            cost=Cost(self.prompt_tokens, self.sampled_tokens, self.tools_called, self.tool_s, self.money),
            stamps=Stamps(
                dispatched_s=plan.dispatched_s,
                first_token_s=plan.dispatched_s + first_token_s,
                done_s=plan.dispatched_s + duration_s,
            ),
            duration_s=duration_s,
            worker_id=plan.worker_id,
            image_digest=provenance.image_digest,
            sandbox_id=provenance.sandbox_id,
            pool=provenance.pool,
            injected_faults=provenance.injected_faults,
            external=provenance.external,
            audit_head=provenance.audit_head,
            safety=provenance.safety,
        )

    def _given(
        self,
        role: Role,
        messages: Sequence[Message],
        token_ids: I32,
        segment: int,
        metadata: dict[str, Any],
        tool_call_id: str = "",
        status: Status = Status.OK,
        taint: str = "",
    ) -> None:
        """A turn that the policy did not sample: mask 0 throughout (cases T6, T7)."""
        mask, logprobs = _given_columns(len(token_ids))
        text = joined_text(messages)
        self.turns.append(
            Turn(
                role=role,
                token_ids=token_ids,
                action_mask=mask,
                behaviour_logprobs=logprobs,
                segment=segment,
                content=text,
                tool_call_id=tool_call_id,
                observation_hash=hash_text(text),
                state_hash=self.state_hash,
                taint=taint,
                status=status,
                token_columns=_NO_COLUMNS,
                metadata=metadata or _NO_METADATA,
            )
        )


def _call_records(
    turn: _Sampled, ended_s: float, status: Status, result: StepResult | None
) -> tuple[ToolCallRecord, ...]:
    """One for each call of a turn, with what the gateway said of it; of a step that broke it said nothing."""
    calls = turn.said.tool_calls
    outcomes = result.calls if result is not None and len(result.calls) == len(calls) else (_NO_OUTCOME,) * len(calls)
    key, began = turn.request.key, turn.sampled_s
    return tuple(
        [
            ToolCallRecord(
                index=index,
                call_id=call.call_id,
                name=call.name,
                arguments=call.arguments,
                key=key,
                start_s=began + outcome.start_s,
                end_s=began + outcome.end_s if outcome.end_s else ended_s,
                status=status,
                decision=outcome.decision,
                rule=outcome.rule,
                tier=outcome.tier,
                source=outcome.source,
                taint=outcome.taint,
                in_doubt=outcome.in_doubt,
                result_hash=outcome.result_hash,
            )
            for index, (call, outcome) in enumerate(zip(calls, outcomes, strict=True))
        ]
    )


def tools_digest(tools: Sequence[ToolSpec]) -> str:
    """The canonical hash of the tools on offer, in their order. Raises EnvironmentFault where they are not JSON."""
    try:
        return _digest_of(msgspec.json.encode(tools, order="deterministic").decode())
    except Exception as error:  # case X16: somebody else's schemas
        raise EnvironmentFault(f"tools are not JSON: {error}", transient=False) from error


@functools.lru_cache(maxsize=64)
def _digest_of(text: str) -> str:
    """Nearly all episodes of a world are offered the same tools."""
    return hash_text(text).canonical


def joined_text(messages: Sequence[Message]) -> str:
    """Several messages as the one text that a turn records and hashes."""
    return messages[0].content if len(messages) == 1 else "\n".join(message.content for message in messages)


def as_step_message(turn: Turn) -> Message:
    """The message that an action turn gave to the environment: what a replay gives it again."""
    calls = tuple(ToolCall(record.name, record.arguments, record.call_id) for record in turn.tool_calls)
    return Message(Role.ASSISTANT, turn.content, turn.reasoning, calls)
