"""What happens to one episode that a harness plays: the counterpart of `actors/episode.py`.

::

    reset ─► offer ─► taken by a client, or by a program that is started here ─► requests … ─► end ─► score ─► record

It ends when the harness says that it is done, when a budget is spent (P27), or when something breaks. The record is an
episode like any other: who grades it, what a fault is and what becomes of it do not depend on who played it.
"""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec

from headrace.actors.deadline import Deadline
from headrace.actors.endings import classify
from headrace.actors.environments.adapter import AsyncEnvironment
from headrace.actors.harness.door import HarnessDoor, Offer
from headrace.actors.harness.environment import HarnessArgs
from headrace.actors.harness.process import run_harness
from headrace.actors.harness.recorded import HarnessEpisode
from headrace.actors.plan import AsyncScorer, Ending, EpisodePlan, PlayedEpisode
from headrace.actors.recorder import Recorder
from headrace.actors.scoring.graded import graded
from headrace.actors.text import well_formed
from headrace.platform.contracts import TokenGenerator
from headrace.platform.errors import EnvironmentFault
from headrace.platform.records.message import Observation
from headrace.platform.records.status import FaultOwner, Status, StopReason

_log = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class Doorway:
    """A door with its address. `url` is its root, such as http://127.0.0.1:8600, and `token` what clients show there,
    empty for none."""

    door: HarnessDoor
    args: HarnessArgs
    url: str = ""
    token: str = ""


async def play_harness(
    plan: EpisodePlan,
    environment: AsyncEnvironment,
    generator: TokenGenerator,
    doorway: Doorway,
    scorer: AsyncScorer | None = None,
) -> PlayedEpisode:
    """Play one episode to its end, whatever that is. Owns `environment` and closes it. Only cancellation is raised."""
    began = time.monotonic()
    deadline = Deadline(math.inf)
    episode: HarnessEpisode | None = None
    offer: Offer | None = None
    played: PlayedEpisode | None = None
    try:
        try:
            with deadline:
                deadline.allow("reset", began, plan.reset_deadline_s)
                observation = await environment.reset(plan.task, plan.seed)
                episode = HarnessEpisode(plan, doorway.door.language, generator, _said_well(observation), began)
                offer = doorway.door.offer(episode)
                ending = await _conversed(plan, episode, offer, doorway, deadline)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            ending = classify(error, deadline, has_acted=False)
        except (Exception, SystemExit) as error:  # the boundary: whatever broke is classified here, once
            ending = classify(error, deadline, has_acted=False)
        finally:
            if episode is not None:
                episode.end(Ending(StopReason.CANCELLED))  # nothing is answered any more, however it ended
            await _let_go(plan, environment, episode, deadline)
        played = await _recorded(plan, environment, episode, ending, time.monotonic() - began, scorer)
        return played
    finally:
        deadline.disarm()
        if offer is not None:
            doorway.door.withdraw(offer, played)


async def _conversed(
    plan: EpisodePlan, episode: HarnessEpisode, offer: Offer, doorway: Doorway, deadline: Deadline
) -> Ending:
    """From the offer to the end of the conversation."""
    program: asyncio.Task[None] | None = None
    if doorway.args.command:
        program = asyncio.create_task(run_harness(doorway.args.command, _program_env(offer, doorway)))
    else:
        deadline.allow("a harness to take the episode", time.monotonic(), doorway.args.take_s)
        await offer.taken.wait()
    deadline.allow("the harness", time.monotonic(), math.inf)  # its seconds are counted below, for they are a budget
    try:
        waiting: set[asyncio.Future[Ending] | asyncio.Task[None]] = {episode.over}
        if program is not None:
            waiting.add(program)
        await asyncio.wait(waiting, timeout=plan.budgets.max_seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        if program is not None and not program.done():
            program.cancel()
            await asyncio.gather(program, return_exceptions=True)
    if episode.over.done():
        return episode.over.result()
    has_spoken = episode.recorder.policy_turns > 0
    if program is not None and program.done() and not program.cancelled():
        program.result()
        if has_spoken:
            return Ending(StopReason.TERMINATED)
        raise EnvironmentFault("the harness ended without an answer of the policy")
    if has_spoken:
        return Ending(StopReason.MAX_SECONDS, Status.BUDGET_EXHAUSTED)
    raise EnvironmentFault(f"the harness had no answer of the policy within {plan.budgets.max_seconds:g} s")


def _program_env(offer: Offer, doorway: Doorway) -> dict[str, str]:
    """What a program is told; it need not open its episode, which is its already."""
    opened = doorway.door.take(offer)
    task = {"messages": opened.messages, "metadata": opened.metadata, "deadline_s": opened.deadline_s}
    episode = f"{doorway.url}/episodes/{opened.episode}"
    return {
        "OPENAI_BASE_URL": f"{episode}/v1",
        "OPENAI_API_KEY": doorway.token or "none",
        "HEADRACE_EPISODE_URL": episode,
        "HEADRACE_TASK": msgspec.json.encode(task).decode(),
        **doorway.args.env,
    }


async def _recorded(
    plan: EpisodePlan,
    environment: AsyncEnvironment,
    episode: HarnessEpisode | None,
    ending: Ending,
    duration_s: float,
    scorer: AsyncScorer | None,
) -> PlayedEpisode:
    """The record, graded."""
    recorder = episode.recorder if episode is not None else Recorder(episode_id=str(plan.attempt_id))
    record = recorder.episode(plan, environment.name, environment.version, environment.provenance, ending, duration_s)
    if episode is not None:
        record = msgspec.structs.replace(record, metadata={"harness": _notes(episode)})
    if ending.owner is not FaultOwner.NONE:
        return PlayedEpisode(episode=record, rewards=(), score=None)
    if scorer is not None:
        recorder.reward(await graded(scorer, plan.task, record), grader_version=scorer.version)
    return PlayedEpisode(episode=record, rewards=tuple(recorder.rewards), score=recorder.score())


def _notes(episode: HarnessEpisode) -> dict[str, object]:
    """What else there is to say of how it was played. Its tools ran outside of headrace's gateway, uncounted."""
    return {
        "tools": "external",
        "agents": episode.agents,
        "segments_opened": episode.segments_opened,
        "retries": episode.retries,
        "ignored": sorted(episode.ignored),
        "info": episode.info,
    }


async def _let_go(
    plan: EpisodePlan, environment: AsyncEnvironment, episode: HarnessEpisode | None, deadline: Deadline
) -> None:
    """Give back the sessions, before any grading (P19), and the world, each whatever becomes of the other."""
    closings: list[tuple[str, Callable[[], Awaitable[None]]]] = [("environment", environment.close)]
    if episode is not None:
        closings.insert(0, ("sessions", episode.close))
    for what, close in closings:
        deadline.allow(what, time.monotonic(), plan.step_deadline_s)
        try:
            with deadline:
                await close()
        except (Exception, SystemExit) as error:
            _log.warning("episode %s: its %s: %s: %s", plan.attempt_id, what, type(error).__name__, error)


def _said_well(observation: Observation) -> Observation:
    return msgspec.structs.replace(observation, messages=tuple(well_formed(observation.messages)))
