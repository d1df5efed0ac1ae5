"""Doing the recorded actions of an episode again in a fresh world, one at a time, and comparing each answer.

The policy is not asked: its recorded messages are. The world is, and each of its answers is compared by canonical
hash; where only the raw hash differs, something accidental did (a time, a path), which is listed but no divergence.
A world that breaks where the recorded one did not has diverged, unless a fresh one may not break there: that is an
interruption, and no claim about the world. Owns the comparison and its deadlines; who closes the world, and what a
difference means, is the caller's.
"""

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from headrace.actors.deadline import Deadline
from headrace.actors.endings import ending_of
from headrace.actors.environments.adapter import AsyncEnvironment
from headrace.actors.environments.cassette import Cassette
from headrace.actors.recorder import as_step_message, joined_text, tools_digest
from headrace.actors.replaying.report import Difference, difference_of_texts, small_diff
from headrace.actors.text import well_formed
from headrace.platform.errors import EnvironmentFault, ExternalDivergence, HostAway, InfrastructureFault, NotFound
from headrace.platform.hashing import hash_text
from headrace.platform.records.episode import Episode
from headrace.platform.records.message import HashPair, Message, Observation, RewardComponent, StepResult
from headrace.platform.records.status import ActionKind, FaultOwner, Role, StopReason
from headrace.platform.records.tables import RewardRow
from headrace.platform.records.turn import Turn

_ENDS = (StopReason.TERMINATED, StopReason.ENV_TRUNCATED)
_NOTHING = HashPair()


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """How long the world may take, in seconds."""

    reset_deadline_s: float = 30.0
    step_deadline_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Action:
    """The `step`-th turn of the policy, turn `index` of the episode, and the turn after it, if any."""

    step: int
    index: int
    turn: Turn
    answer: Turn | None

    @property
    def reached_the_world(self) -> bool:
        """It was acted on. What could not be read, and what the world never answered, was not."""
        return self.turn.action_kind is not ActionKind.NONE


def actions_of(episode: Episode) -> list[Action]:
    """The turns of the policy, in order."""
    turns = episode.turns
    sampled = [index for index, turn in enumerate(turns) if turn.role is Role.ASSISTANT]
    return [
        Action(step, index, turns[index], turns[index + 1] if index + 1 < len(turns) else None)
        for step, index in enumerate(sampled, start=1)
    ]


class Execution:
    """One re-execution of `episode`, which has at least one turn.

    Args:
        key_of: the key of a step, in a branch of its own (P26), so that a world that remembers keys acts again.
        deadline: of the present task.
        cassette: of `environment`, already loaded; None where it has none.
        rewards: of the episode; None where they are not compared. Those of an episode that ended by a fault never are,
            for they were dropped.
    """

    def __init__(
        self,
        episode: Episode,
        environment: AsyncEnvironment,
        key_of: Callable[[int], str],
        deadline: Deadline,
        limits: Limits,
        cassette: Cassette | None = None,
        rewards: Sequence[RewardRow] | None = None,
    ) -> None:
        self.episode = episode
        self.actions = actions_of(episode)
        self.differences: list[Difference] = []
        self.ended = False
        """The world has ended the episode, or broke: it can be asked no more."""
        self.interrupted = ""
        """At which step it broke by what a fresh one may not, and how."""
        self.nowhere = False
        """No host took the session."""
        self._environment = environment
        self._key_of = key_of
        self._deadline = deadline
        self._limits = limits
        self._cassette = cassette
        is_compared = rewards is not None and episode.fault_owner is FaultOwner.NONE
        self._rewards = _by_turn(rewards or ()) if is_compared else None

    async def reset(self) -> Observation | None:
        """Begin; None where the world broke.

        Raises:
            NotFound: the world at hand is not the one recorded.
        """
        episode, world = self.episode, self._environment
        if world.version:  # a host says its version when a session begins
            check_same_world(episode, world)
        self._deadline.allow("reset", time.monotonic(), self._limits.reset_deadline_s)
        try:
            with self._deadline:
                observation = await world.reset(episode.task, episode.seed)
            offered = tools_digest(world.tools())
        except (Exception, SystemExit, asyncio.CancelledError) as error:  # the world's boundary
            if not world.version and not isinstance(error, InfrastructureFault | TimeoutError | asyncio.CancelledError):
                raise NotFound(f"{episode.episode_id} cannot be played here: {_told(error)}") from error
            self._broke(0, error)
            return None
        check_same_world(episode, world)
        check_same_image(episode, world)
        if (recorded := episode.digests.tool_schemas) and recorded != offered:
            self._compare_hashes(0, "tools", HashPair(recorded, recorded), HashPair(offered, offered))
        opening = episode.turns[0]
        self._compare_said(0, opening.observation_hash, opening.content, observation.messages)
        self._compare_hashes(0, "state", opening.state_hash, observation.state_hash)
        self._compare_outside(0)
        return observation

    async def step(self, action: Action) -> StepResult | None:
        """Do an action again, if it reached the world; None where it did not, and where the world broke."""
        if self.ended or not action.reached_the_world:
            return None
        turn, answer, number = action.turn, action.answer, action.step
        self._deadline.allow("step", time.monotonic(), self._limits.step_deadline_s)
        try:
            with self._deadline:
                result = await self._environment.step(as_step_message(turn), self._key_of(number))
            if result.status.is_error:
                told = f"{self._environment.name} answered {result.status}"
                raise EnvironmentFault(told, result.status.is_retryable)
            ending = ending_of(result)
        except (Exception, SystemExit, asyncio.CancelledError) as error:  # the same boundary
            self._broke(number, error)
            return None
        self._compare_hashes(number, "state", turn.state_hash, result.state_hash)
        if answer is None or answer.role is Role.ASSISTANT:
            self._compare_said(number, _NOTHING, "", result.messages)
        else:
            self._compare_said(number, answer.observation_hash, answer.content, result.messages)
        if result.status is not turn.status:
            self._differ(number, "status", turn.status, result.status)
        episode = self.episode
        is_end = action is self.actions[-1] and episode.stop_reason in _ENDS
        recorded_end, replayed_end = episode.stop_reason if is_end else "", ending.stop_reason if ending else ""
        if recorded_end != replayed_end:
            self._differ(number, "end", recorded_end or "it went on", replayed_end or "it went on")
        if self._rewards is not None:
            recorded, replayed = self._rewards.get(action.index, ""), _said_of(result.rewards)
            if recorded != replayed:
                self._differ(number, "reward", recorded, replayed)
        self._compare_outside(number)
        self.ended = ending is not None
        return result

    def _compare_said(self, step: int, recorded: HashPair, text: str, messages: Sequence[Message]) -> None:
        said = joined_text(well_formed(messages)) if messages else ""
        replayed = hash_text(said) if messages else _NOTHING
        if recorded != replayed:
            diff = small_diff(text, said)
            found = Difference(step=step, what="observation", recorded=recorded, replayed=replayed, diff=diff)
            self.differences.append(found)

    def _compare_hashes(self, step: int, what: str, recorded: HashPair, replayed: HashPair) -> None:
        if recorded != replayed:
            self.differences.append(Difference(step=step, what=what, recorded=recorded, replayed=replayed))

    def _compare_outside(self, step: int) -> None:
        """What was asked of services outside the world, unless whatever is missing may be asked for. A request that
        only something accidental tells from the recorded one is a raw difference."""
        cassette = self._cassette
        if cassette is None:
            return
        for recorded, asked in cassette.accidental.get(step, ()):
            self._differ(step, "external", recorded, asked)
        if cassette.live:
            return
        unused, unknown = cassette.unused(), cassette.unknown()
        if unused or unknown:
            self._differ(step, "external", "\n".join(unused), "\n".join(unknown))

    def _differ(self, step: int, what: str, recorded: str, replayed: str) -> None:
        self.differences.append(difference_of_texts(step, what, recorded, replayed))

    def _broke(self, step: int, error: BaseException) -> None:
        """The recorded world did not break here. What a fresh world may not meet is no divergence."""
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise error
        self.ended = True
        cassette = self._cassette
        unknown = cassette.unknown() if cassette is not None and not cassette.live else []
        if unknown or isinstance(error, ExternalDivergence):
            self._differ(step, "external", "", "\n".join(unknown) or _told(error))
        elif _is_transient(error):
            self.interrupted = f"step {step}: {_told(error)}"
            self.nowhere = step == 0 and isinstance(error, HostAway) and not self._environment.provenance.pool
        else:
            self._differ(step, "fault", "", _told(error))


def check_same_world(episode: Episode, world: AsyncEnvironment) -> None:
    """Raises NotFound where the world at hand has another name or version than the one recorded."""
    if (world.name, world.version) != (episode.environment, episode.environment_version):
        raise NotFound(
            f"{episode.episode_id} was played in {episode.environment} version {episode.environment_version}; the world"
            f" at hand is {world.name} version {world.version}. Replay it where that version is installed or hosted"
        )


def check_same_image(episode: Episode, world: AsyncEnvironment) -> None:
    """Raises NotFound where an image was recorded and the world at hand, after its reset, has another."""
    at_hand = world.provenance.image_digest if episode.image_digest else ""
    if episode.image_digest != at_hand:
        raise NotFound(
            f"{episode.episode_id} was played on the image {episode.image_digest}; the world at hand has"
            f" {at_hand or 'none'}. Get that image and name it in the recipe's sandbox, or on the environment host"
        )


def _by_turn(rewards: Sequence[RewardRow]) -> Mapping[int, str]:
    """What the world itself rewarded each turn with."""
    found: dict[int, list[RewardComponent]] = {}
    for row in rewards:
        if row.turn is not None and not row.grader_version:
            found.setdefault(row.turn, []).append(RewardComponent(row.kind, row.value or 0.0, row.valid))
    return {turn: _said_of(components) for turn, components in found.items()}


def _said_of(components: Sequence[RewardComponent]) -> str:
    """All of them, in whatever order they were given."""
    return "\n".join(sorted(f"{each.kind} {each.value if _is_valid(each) else 'invalid'}" for each in components))


def _is_valid(component: RewardComponent) -> bool:
    return component.valid and math.isfinite(component.value)


def _is_transient(error: BaseException) -> bool:
    """A fresh world may not meet it: what `classify` calls transient when an episode is played."""
    return isinstance(error, TimeoutError) or (isinstance(error, EnvironmentFault) and error.transient)


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
