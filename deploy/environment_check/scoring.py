"""Plays one scripted episode as a worker would, and has it graded by whoever grades it in a run."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from headrace.actors.environments.adapter import as_async
from headrace.actors.environments.kind import EnvironmentKind
from headrace.actors.episode import play_episode
from headrace.actors.plan import EpisodePlan
from headrace.actors.scoring.process import ScorerProcess
from headrace.deploy.environment_check.scripts import Script
from headrace.platform.contracts import Environment
from headrace.platform.errors import EnvironmentFault
from headrace.platform.records.episode import Budgets
from headrace.platform.records.generation import GenerationRequest, SamplingParams
from headrace.platform.records.ids import AttemptId
from headrace.platform.records.message import Task
from headrace.platform.records.status import Purpose
from headrace.platform.records.versions import VersionRef
from headrace.platform.testing.fakes.engine import ScriptedEngine
from headrace.platform.testing.fakes.renderer import END, CharRenderer


class NotShown(Exception):
    """Says why a check could not look."""


async def is_scored(
    kind: EnvironmentKind, make: Callable[[], Environment], task: Task, script: Script, deadline_s: float
) -> None:
    """Raise what keeps the episode of `script` from having a score.

    Raises:
        EnvironmentFault: a fault during the episode, an invalid reward, or none where the task was solved.
        NotShown: no reward, but who played at random may have earned none.
    """
    renderer = CharRenderer()

    def said(request: GenerationRequest) -> list[int]:
        turn = int(request.key.rsplit("/", 1)[1])
        return renderer.render([script.messages[turn]], ())[1:-1]  # without the header before it and the one after

    scorer = None
    if kind.scorer is not None:
        scorer = ScorerProcess(kind.scorer.kind, kind.scorer.args, deadline_s=min(kind.scorer.deadline_s, deadline_s))
    plan = EpisodePlan(
        attempt_id=AttemptId("check", 0, 0, 0, Purpose.EVAL),
        task=task,
        seed=task.seed,
        version=VersionRef("scripted", 0),
        sampling=SamplingParams(max_new_tokens=1 << 16, stop_token_ids=(END,)),
        budgets=Budgets(len(script.messages), 1 << 20, deadline_s),
    )
    threads = ThreadPoolExecutor(1, thread_name_prefix="checked environment")
    try:
        played = await play_episode(plan, as_async(make(), threads), renderer, ScriptedEngine(said), scorer)
    finally:
        threads.shutdown(wait=False)
        if scorer is not None:
            await scorer.close()
    if played.episode.fault:
        raise EnvironmentFault(played.episode.fault)
    if invalid := [reward.evidence for reward in played.rewards if not reward.valid]:
        raise EnvironmentFault("; ".join(invalid))
    if not played.rewards:
        nothing = "the episode ended, and neither the environment nor a scorer gave a reward"
        if not script.demonstrated:
            raise NotShown(f"{nothing}; it may have been played badly: give the environment demonstrate(task)")
        raise EnvironmentFault(nothing)
