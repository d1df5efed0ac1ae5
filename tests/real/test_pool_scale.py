"""Replicas that join and leave while a run trains: nothing is lost, and the command line says what happened."""

import asyncio
import time
from collections import Counter

import pytest
import ray
from command_line import environment, last_json, run
from test_ray_runtime import carry, small

from headrace.deploy.runtime_ray import RayRuntime
from headrace.platform.records.status import Fate
from headrace.platform.store.episodes import EpisodeStore
from headrace.platform.store.events import Events, RunEvent
from headrace.platform.store.tables import FateTable

pytestmark = pytest.mark.timeout(200)


class Scaled(RayRuntime):
    """After its first step, has the command line scale the pool to two replicas; after its fourth, back to one. The
    learner goes on meanwhile, but not beyond the step at which the command has to be over."""

    def __init__(self, context):
        super().__init__(context)
        type(self).told = self.told = {}
        self._scaling = None

    async def step(self):
        report = await super().step()
        if report.step in (3, 6) and self._scaling is not None:
            self.told[report.step] = await self._scaling
        if report.step in (1, 4):
            self._scaling = asyncio.create_task(self._scale(2 if report.step == 1 else 1))
        return report

    async def _scale(self, replicas):
        told = await self._headrace("pool", "scale", self._context.run, str(replicas))
        return told, await self._headrace("pool", "show", self._context.run)

    async def _headrace(self, *args):
        folder = self._context.local(".").parent
        given = (*args, "--runs-dir", str(folder), "--json")
        code, out, err = await asyncio.to_thread(run, folder, *given, timeout_s=90, env=environment())
        assert code == 0, err
        return last_json(out)


async def test_a_pool_is_scaled_up_and_down_while_it_trains(ray_session, lookup_model, tmp_path):
    summary, context = await carry(small(lookup_model, tmp_path, "learner.steps=8"), Scaled)
    (up, two), (down, one) = Scaled.told[3], Scaled.told[6]
    assert (up["was"], up["replicas"], down["was"], down["replicas"]) == (1, 2, 2, 1)
    assert [replica["name"] for replica in two["replicas"]] == ["replica-0", "replica-1"]
    assert all(replica["versions"] and not replica["draining"] for replica in two["replicas"])  # case S6
    assert len(one["replicas"]) == 1

    scaled = [each for each in Events(context.root, time.time).read() if each["event"] == RunEvent.POOL_SCALED]
    assert [(each["was"], each["replicas"]) for each in scaled] == [(1, 2), (2, 1)]
    assert summary["learner_steps"] == 8 and summary["restarts"] == {}
    assert summary["equation_holds"] and summary["fates"]["in_flight"] == 0
    rows = FateTable(context.root).by_episode().values()
    assert Counter(row.fate for row in rows)[Fate.FAILED] == 0, "no episode is lost"
    played = Counter(
        turn.replica for episode in EpisodeStore(context.root).iterate() for turn in episode.turns if turn.replica
    )
    assert played["replica-0"] and played["replica-1"], played


class EngineDying(RayRuntime):
    """The engine of replica 1 dies after the second step, while its process lives on."""

    async def step(self):
        report = await super().step()
        if report.step == 2:
            actor = ray.get_actor("replica-1", namespace=self._parts.namespace)
            await actor.__ray_call__.remote(lambda shell: shell._service._engine._die("out of memory"))
        return report


async def test_an_engine_that_dies_in_a_live_process_ends_its_replica(ray_session, lookup_model, tmp_path):  # case S5
    config = small(lookup_model, tmp_path, "learner.steps=5", "serving.replicas=2")
    summary, context = await carry(config, EngineDying)
    assert summary["restarts"] == {"replica-1": 1}
    assert summary["equation_holds"] and summary["fates"]["in_flight"] == 0
    (death,) = [each for each in Events(context.root, time.time).read() if each["event"] == RunEvent.PART_DIED]
    assert "the engine is dead: out of memory" in death["cause"]


async def test_a_run_that_is_over_has_no_pool(small_run, tmp_path):
    (root,) = (small_run / "runs").iterdir()
    for args in (("scale", root.name, "2"), ("show", root.name)):
        code, _, err = await asyncio.to_thread(run, small_run, "pool", *args, "--json", timeout_s=60, env=environment())
        assert code == 1 and "is not running (it is finished)" in err
