"""Evaluation beside training through Ray: the pinned version stays loaded while newer ones are published."""

import pytest
from test_ray_runtime import carry, small

from headrace.deploy.runtime_ray import RayRuntime
from headrace.platform.store.episodes import EpisodeStore
from headrace.platform.store.evaluations import EvaluationStore

pytestmark = pytest.mark.timeout(300)


class SlowlyEvaluating(RayRuntime):
    """Lets the learner publish two more versions before an evaluation beside training begins to play."""

    async def evaluate(self, version: int, *rest):
        if version in (2, 4):
            await self._connected().watch_head(version, 30)
            await self._connected().watch_head(version + 1, 30)
        return await super().evaluate(version, *rest)


async def test_an_evaluated_version_outlives_the_ones_that_replicas_keep(ray_session, lookup_model, tmp_path):
    config = small(
        lookup_model, tmp_path, "eval.every=2", "learner.steps=6", "serving.keep_versions=1", "learner.keep_versions=1"
    )
    summary, context = await carry(config, SlowlyEvaluating)
    store = EvaluationStore(context.root)
    found = {each.version: each for each in map(store.read, store.names())}
    assert sorted(found) == [0, 2, 4, 6]
    assert all(outcome.score is not None for each in found.values() for outcome in each.outcomes)
    played = {e.episode_id: e.version.number for e in EpisodeStore(context.root).iterate({"purpose": "eval"})}
    assert played == {o.episode_id: version for version, each in found.items() for o in each.outcomes}
    assert summary["best"]["version"] in found
    assert summary["equation_holds"]
