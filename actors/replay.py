"""Playing a stored episode again: the same actions, the same seed, a fresh world; what differs, and where first.

The policy is not asked: its recorded messages are. The world is, and each of its answers is compared by canonical
hash; where only the raw hash differs, something accidental did (a time, a path), which is listed but no divergence.
"""

from collections.abc import AsyncIterator

import msgspec

from headrace.actors.endings import ending_of
from headrace.actors.environments.adapter import AsyncEnvironment
from headrace.actors.recorder import as_step_message, joined_text
from headrace.platform.errors import NotFound
from headrace.platform.hashing import hash_text
from headrace.platform.records.episode import Episode
from headrace.platform.records.message import HashPair
from headrace.platform.records.status import ActionKind, Role, StopReason
from headrace.platform.records.turn import Turn

_ENDS = (StopReason.TERMINATED, StopReason.ENV_TRUNCATED)


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One hash that did not come out as recorded. `step` 0 is the reset, step n the n-th turn of the policy."""

    step: int
    what: str
    recorded: HashPair
    replayed: HashPair

    @property
    def is_divergence(self) -> bool:
        """More than something accidental differs."""
        return self.recorded.canonical != self.replayed.canonical


class ReplayReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a replay found. `first_divergence` is a step number, None when the episode replays equal."""

    episode_id: str
    steps: int
    first_divergence: int | None
    differences: tuple[Difference, ...]

    @property
    def equal(self) -> bool:
        """Every canonical hash is as recorded."""
        return self.first_divergence is None


async def replay_episode(episode: Episode, environment: AsyncEnvironment) -> ReplayReport:
    """Play `episode` again in `environment`, which is closed afterwards.

    Keys are those of a branch of its own (P26), so a world that remembers keys runs every action again. A world that
    ends or breaks at another step than recorded has diverged there, and is asked no further.

    Raises:
        NotFound: when the environment is of another name or version than the one recorded, or nothing was recorded.
    """
    differences: list[Difference] = []
    steps = 0
    try:
        _check_comparable(episode, environment)
        async for step, what, recorded, replayed in _compare(episode, environment):
            steps = max(steps, step)
            if recorded != replayed:
                differences.append(Difference(step=step, what=what, recorded=recorded, replayed=replayed))
    finally:
        await environment.close()
    divergences = [difference.step for difference in differences if difference.is_divergence]
    return ReplayReport(
        episode_id=episode.episode_id,
        steps=steps,
        first_divergence=divergences[0] if divergences else None,
        differences=tuple(differences),
    )


def _check_comparable(episode: Episode, environment: AsyncEnvironment) -> None:
    if (environment.name, environment.version) != (episode.environment, episode.environment_version):
        raise NotFound(
            f"{episode.episode_id} was played in {episode.environment} version {episode.environment_version};"
            f" this is {environment.name} version {environment.version}"
        )
    if not episode.turns:
        raise NotFound(f"{episode.episode_id} has no turn that could be compared: {episode.fault or episode.status}")


async def _compare(
    episode: Episode, environment: AsyncEnvironment
) -> AsyncIterator[tuple[int, str, HashPair, HashPair]]:
    """Step, what is compared, the recorded and the replayed hash; in the order in which it happened."""
    opening, *later = episode.turns
    last = max((turn for turn, each in enumerate(later) if each.role is Role.ASSISTANT), default=-1)
    try:
        observation = await environment.reset(episode.task, episode.seed)
    except Exception as error:  # the world's boundary: the recorded one did not break here
        yield 0, "fault", HashPair(), _fault(error)
        return
    yield 0, "observation", opening.observation_hash, hash_text(joined_text(observation.messages))
    yield 0, "state", opening.state_hash, observation.state_hash
    step = 0
    for index, (turn, answer) in enumerate(zip(later, [*later[1:], None], strict=True)):
        if turn.role is not Role.ASSISTANT:
            continue
        step += 1
        if not _reached_the_world(turn):
            continue
        try:
            result = await environment.step(as_step_message(turn), f"{episode.episode_id}/replay/{step}")
            ending = ending_of(result)
        except Exception as error:  # the same boundary
            yield step, "fault", HashPair(), _fault(error)
            return
        yield step, "state", turn.state_hash, result.state_hash
        recorded = answer.observation_hash if answer is not None else HashPair()
        replayed = hash_text(joined_text(result.messages)) if result.messages else HashPair()
        yield step, "observation", recorded, replayed
        recorded_end = episode.stop_reason if index == last and episode.stop_reason in _ENDS else ""
        yield step, "end", hash_text(recorded_end), hash_text(ending.stop_reason if ending is not None else "")
        if ending is not None:
            return


def _fault(error: Exception) -> HashPair:
    return hash_text(f"{type(error).__name__}: {error}")


def _reached_the_world(turn: Turn) -> bool:
    return turn.action_kind is not ActionKind.NONE
