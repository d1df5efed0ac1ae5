"""How well a model folder does in the worlds of a recipe, before there is a run: what gates a supervised stage."""

import asyncio
from pathlib import Path

from headrace.actors.episode import play_episode
from headrace.actors.plan import EpisodePlan, PlayedEpisode
from headrace.actors.rendering import load_renderer
from headrace.actors.sampling import sampling_params
from headrace.actors.worlds import Worlds
from headrace.deploy.context import POLICY_ID
from headrace.deploy.engines import build_engine
from headrace.deploy.wiring import build_scorers
from headrace.platform.config import RunConfig
from headrace.platform.errors import RunFailed
from headrace.platform.records.ids import AttemptId
from headrace.platform.records.status import Purpose
from headrace.platform.records.versions import VersionManifest, VersionRef


async def measured_success(config: RunConfig, folder: Path, tasks: int) -> float:
    """Mean score of `tasks` episodes on the dev split, sampled by a real engine in this thread.

    Raises:
        RunFailed: none of them gave a valid reward; names the first fault.
    """
    ref = VersionRef(POLICY_ID, 0)
    manifest = VersionManifest(
        ref=ref, parent=None, parent_hash="", fence=0, kind="full", content_hash="", batches=0, path=str(folder)
    )
    engine = build_engine(config, folder, "sft", inline=True)
    await engine.load(manifest, str(folder))
    renderer, worlds = load_renderer(folder), Worlds(config.environments, "dev", config.seed)
    worlds.open_resources()
    scorers = build_scorers(config.environments)

    async def play(position: int) -> PlayedEpisode:
        setting = worlds.setting(position)
        plan = EpisodePlan(
            attempt_id=AttemptId("sft", position, 0, 0, Purpose.SFT),
            task=setting.task,
            seed=setting.seed,
            version=ref,
            sampling=sampling_params(setting.config, renderer),
            budgets=setting.config.budgets.budgets(),
            reset_deadline_s=setting.config.reset_deadline_s,
            step_deadline_s=setting.config.step_deadline_s,
            request_deadline_s=config.serving.request_deadline_s,
        )
        environment = worlds.async_environment(setting.config)
        return await play_episode(plan, environment, renderer, engine, scorers.get(setting.config.known_as))

    try:
        played = await asyncio.gather(*(play(position) for position in worlds.distinct(range(tasks))))
    finally:
        closings = [engine.close(), worlds.resources.close(), *(scorer.close() for scorer in scorers.values())]
        await asyncio.gather(*closings)
    scores = [each.score for each in played if each.score is not None]
    if not scores:
        raise RunFailed(
            f"none of {tasks} episodes gave a valid reward to measure by; the first fault: {_fault(played)}"
        )
    return sum(scores) / len(scores)


def _fault(played: list[PlayedEpisode]) -> str:
    """What went wrong first: in a world, else in a scorer."""
    faults = (each.episode.fault for each in played)
    evidence = (row.evidence for each in played for row in each.rewards if not row.valid)
    return next((text for text in (*faults, *evidence) if text), "none was recorded")
