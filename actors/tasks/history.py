"""What a run's stored training episodes tell the curriculum, so that a resumed run knows what the interrupted one knew.

The position in the data and the groups that count are one number, the dispatch sequence of the checkpoint.
"""

from headrace.actors.tasks.curriculum import Curriculum, TaskResult
from headrace.platform.config.tasks import CurriculumConfig
from headrace.platform.records.status import FaultOwner, Purpose
from headrace.platform.records.tables import score_of
from headrace.platform.store.episodes import EpisodeStore
from headrace.platform.store.tables import RewardTable


def results_from_store(config: CurriculumConfig, root_url: str, before: int | None = None) -> list[TaskResult]:
    """What the training episodes of a run root say, for `Curriculum.observe`.

    Args:
        before: leaves out groups from this number on: the dispatch sequence of the checkpoint that a run resumes from.
    """
    curriculum, rewards, results = Curriculum(config), RewardTable(root_url).by_episode(), []
    for episode in EpisodeStore(root_url).iterate({"purpose": Purpose.TRAIN.value}):
        rows = rewards.get(episode.episode_id, [])
        if episode.fault_owner is not FaultOwner.NONE or any(not row.valid for row in rows):
            continue
        if before is None or episode.dispatch_sequence < before:
            score = score_of(rows) or 0.0
            key = curriculum.key(episode.task)
            results.append(TaskResult(episode.task.environment, key, score, episode.dispatch_sequence))
    return results


def curriculum_from_store(config: CurriculumConfig, root_url: str, before: int | None = None) -> Curriculum:
    """The curriculum as it was when the run had played the groups below `before`."""
    curriculum = Curriculum(config)
    curriculum.observe(results_from_store(config, root_url, before))
    return curriculum
