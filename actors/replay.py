"""Playing a stored episode again: the same actions, the same seed, a fresh world; what differs, and where first.

What an episode ended by that no world can be asked about (a fault, a kill, a time-out) is taken from the record; all
before is compared. How a step is done again is `replaying/execution.py`.
"""

import logging
import math
import time
from collections.abc import Sequence

from headrace.actors.deadline import Deadline
from headrace.actors.environments.adapter import AsyncEnvironment
from headrace.actors.environments.cassette import Cassette, load_cassette
from headrace.actors.replaying.execution import Execution, Limits
from headrace.actors.replaying.report import Difference, ReplayReport
from headrace.platform.errors import NotFound
from headrace.platform.records.episode import Episode
from headrace.platform.records.status import StopReason
from headrace.platform.records.tables import RewardRow

__all__ = ["Difference", "Limits", "ReplayReport", "replay_episode"]

_log = logging.getLogger(__name__)
_FROM_RECORD = (StopReason.FAULT, StopReason.CANCELLED, StopReason.MAX_SECONDS)
_DEFAULT_LIMITS = Limits()


async def replay_episode(
    episode: Episode,
    environment: AsyncEnvironment,
    *,
    branch: int = 1,
    limits: Limits = _DEFAULT_LIMITS,
    live: bool = False,
    rewards: Sequence[RewardRow] | None = None,
) -> ReplayReport:
    """Play `episode` again in `environment`, which is closed afterwards.

    Keys are those of branch number `branch`, 1 or more (P26), so a world that remembers keys runs every action again.
    A world that ends or breaks at another step than recorded has diverged there, and is asked no further; where a fresh
    one may not break (a host or a sandbox is gone, a deadline passed), the report is `interrupted` and claims nothing.
    An episode that never began replays equal, in no step.

    Args:
        live: whether what the cassette does not know may be asked of services outside the world.
        rewards: the episode's; what the world itself gave is compared too.

    Raises:
        NotFound: the environment is of another name, version or image than the one recorded, or has no cassette to
            answer from.
    """
    deadline = Deadline(math.inf)
    execution, cassette = None, None
    try:
        if episode.turns:
            cassette = load_cassette(environment, episode.external, live)
            if cassette is None and episode.external and not live:
                raise NotFound(
                    f"{episode.episode_id} recorded answers from outside its world, and the world at hand cannot take"
                    " them up; replay it in this process rather than on a host, or give --live"
                )
            prefix = f"{episode.episode_id}/{branch}/"
            execution = Execution(
                episode, environment, lambda step: f"{prefix}{step - 1}", deadline, limits, cassette, rewards
            )
            await execution.reset()
            for action in execution.actions:
                await execution.step(action)
    finally:
        await _closed(environment, deadline, limits)
    return _report(episode, execution, cassette)


async def _closed(environment: AsyncEnvironment, deadline: Deadline, limits: Limits) -> None:
    """What cannot be closed is logged; the comparison stands."""
    deadline.allow("close", time.monotonic(), limits.step_deadline_s)
    try:
        with deadline:
            await environment.close()
    except (Exception, SystemExit) as error:
        _log.warning("the environment of a replay is not closed: %s: %s", type(error).__name__, error)
    finally:
        deadline.disarm()


def _report(episode: Episode, execution: Execution | None, cassette: Cassette | None) -> ReplayReport:
    differences = execution.differences if execution is not None else []
    diverged = [difference.step for difference in differences if difference.is_divergence]
    from_record = ""
    if episode.stop_reason in _FROM_RECORD or not episode.turns:
        from_record = f"{episode.stop_reason}: {episode.fault}" if episode.fault else str(episode.stop_reason)
    answered = cassette.answered if cassette is not None else {}
    missing = cassette.missing if cassette is not None and cassette.live else {}
    return ReplayReport(
        episode_id=episode.episode_id,
        steps=len(execution.actions) if execution is not None else 0,
        first_divergence=diverged[0] if diverged else None,
        differences=tuple(differences),
        from_record=from_record,
        interrupted=execution.interrupted if execution is not None and not diverged else "",
        nowhere=execution is not None and execution.nowhere,
        fidelity_gap=sum(answered.values()),
        fidelity_steps=tuple(answered),
        live_calls=sum(map(len, missing.values())),
    )
