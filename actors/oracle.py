"""The oracle: an environment's own demonstration of a task, played in a fresh session to see whether it can be solved.

A fault of an episode does not say whose it was: the task may be broken, or the moment was bad. The oracle decides
(P27). It plays what `demonstrate(task)` shows, a static method that an environment may have, with the deadlines and the
judgement of an episode but without a policy:

- WORKS: the demonstration reached its end, and a reward above zero if the environment gives rewards at all.
- BROKEN: a fault, no end, or no reward. The task cannot be solved as it is.
- UNKNOWN: nothing is demonstrated, or what the environment stands on failed.

A transient fault is tried again in another fresh session, as that of an episode is. What follows from a verdict is
`quarantine.py`'s.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import NamedTuple

from headrace.actors.deadline import Deadline
from headrace.actors.endings import classify, ending_of
from headrace.actors.environments.adapter import AsyncEnvironment
from headrace.actors.environments.off_loop import OffLoop
from headrace.platform.errors import EnvironmentFault
from headrace.platform.records.message import Message, RewardComponent, StepResult, Task
from headrace.platform.records.status import FaultOwner, RewardKind, Role, Status

_log = logging.getLogger(__name__)
TRIES = 3
"""Fresh sessions in which a demonstration may meet a transient fault."""
_CLOSE_S = 30.0

Demonstrate = Callable[[Task], Sequence[Message]]
"""The assistant's messages that play a task to its end, with the last one and not before."""


class Finding(StrEnum):
    """What an oracle found out about a task."""

    WORKS = "works"
    BROKEN = "broken"
    UNKNOWN = "unknown"


class OracleVerdict(NamedTuple):
    """The finding and its cause, which is empty for a task that works."""

    finding: Finding
    cause: str = ""


def demonstration_of(environment: object) -> Demonstrate | None:
    """The `demonstrate` of an environment, as it was built: an adapted one does not show it."""
    return getattr(environment, "demonstrate", None)


async def oracle_verdict(
    make: Callable[[], AsyncEnvironment],
    task: Task,
    seed: int,
    demonstrate: Demonstrate | None,
    reset_s: float,
    step_s: float,
) -> OracleVerdict:
    """Play the demonstration of `task`.

    Holds nothing but the session, and waits for no one who waits for it (P21). Only cancellation is raised; every
    session is closed (case X4).

    Args:
        make: a fresh session, never seen by an episode.
        task: what is in doubt.
        seed: that of the episodes whose fault it was.
        demonstrate: see `demonstration_of`.
        reset_s: how long a reset may take, as an episode's.
        step_s: how long one step may take, as an episode's, and `demonstrate`.
    """
    if demonstrate is None:
        return OracleVerdict(Finding.UNKNOWN, "the environment demonstrates nothing")
    try:
        async with asyncio.timeout(step_s):
            shown = list(await OffLoop().call(demonstrate, task))
    except (Exception, SystemExit) as error:  # foreign code: who cannot show it knows nothing about it
        return OracleVerdict(Finding.UNKNOWN, f"demonstrate raised {type(error).__name__}: {error}")
    if not shown or any(not isinstance(each, Message) or each.role is not Role.ASSISTANT for each in shown):
        return OracleVerdict(Finding.UNKNOWN, "demonstrate returned no messages of the assistant")
    verdict = OracleVerdict(Finding.UNKNOWN)
    for attempt in range(TRIES):
        verdict, may_pass = await _attempt(
            make(), task, seed, shown, (reset_s, step_s), f"oracle/{task.task_id}/{attempt}"
        )
        if not may_pass:
            break
    return verdict


async def _attempt(
    environment: AsyncEnvironment,
    task: Task,
    seed: int,
    shown: Sequence[Message],
    patience: tuple[float, float],
    key: str,
) -> tuple[OracleVerdict, bool]:
    """What one session came to, and whether another may come to something else."""
    deadline = Deadline(math.inf)
    try:
        with deadline:
            return await _verdict(environment, task, seed, shown, deadline, patience, key), False
    except (Exception, SystemExit, asyncio.CancelledError) as error:  # the boundary: judged as an episode's fault is
        if isinstance(error, asyncio.CancelledError) and _is_cancelled():
            raise
        ending = classify(error, deadline, has_acted=False)
        # What the environment stands on says nothing about the task.
        finding = Finding.UNKNOWN if ending.owner is FaultOwner.INFRASTRUCTURE else Finding.BROKEN
        return OracleVerdict(finding, ending.fault), ending.status.is_retryable
    finally:
        deadline.disarm()
        await _close(environment)


async def _verdict(
    environment: AsyncEnvironment,
    task: Task,
    seed: int,
    shown: Sequence[Message],
    deadline: Deadline,
    patience: tuple[float, float],
    key: str,
) -> OracleVerdict:
    reset_s, step_s = patience
    deadline.allow("the demonstration's reset", time.monotonic(), reset_s)
    await environment.reset(task, seed)
    rewards: list[RewardComponent] = []
    for turn, message in enumerate(shown):
        deadline.allow(f"step {turn + 1} of the demonstration", time.monotonic(), step_s)
        answer: StepResult = await environment.step(message, f"{key}/{turn}")
        if answer.status.is_error:
            raise EnvironmentFault(f"{environment.name} answered {answer.status}", answer.status.is_retryable)
        rewards += answer.rewards
        if (ending := ending_of(answer)) is None:
            continue
        if turn < len(shown) - 1:
            return _broken(f"it ends after {turn + 1} of the {len(shown)} messages that are demonstrated")
        if ending.status is Status.SAFETY_BLOCK:
            return _broken("its demonstration is blocked for safety")
        if any(not reward.valid for reward in rewards):
            return _broken("its demonstration's reward is not valid")
        if rewards and (earned := _earned(rewards)) <= 0:
            return _broken(f"its demonstration earns {earned:g}")
        if answer.truncated and not rewards:
            return _broken("a limit ends its demonstration")
        return OracleVerdict(Finding.WORKS)  # who gives no rewards is graded by somebody else
    return _broken("it goes on after all that is demonstrated")


def _earned(rewards: Sequence[RewardComponent]) -> float:
    """What says whether a task was solved: the outcome where there is one, else everything."""
    outcomes = [reward.value for reward in rewards if reward.kind is RewardKind.OUTCOME]
    return sum(outcomes or [reward.value for reward in rewards if reward.kind.is_reward])


def _broken(cause: str) -> OracleVerdict:
    return OracleVerdict(Finding.BROKEN, cause)


async def _close(environment: AsyncEnvironment) -> None:
    """Close whatever happened. What cannot be closed is logged; a cancellation meanwhile comes after a second try."""
    try:
        await _closed(environment)
    except asyncio.CancelledError:
        await _closed(environment)
        raise


async def _closed(environment: AsyncEnvironment) -> None:
    try:
        async with asyncio.timeout(_CLOSE_S):
            await environment.close()
    except (Exception, SystemExit) as error:
        _log.warning("a session of the oracle is not closed: %s: %s", type(error).__name__, error)


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
