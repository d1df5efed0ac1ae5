"""Parts that are killed in the middle of a run, with kill -9: they come again, or the run says in time why it ends."""

import asyncio
import json
import os
import signal
import tempfile
import time
from collections import Counter
from typing import ClassVar

import psutil
import pytest
import ray
from command_line import environment, start
from test_interrupt import MARK, ended, given, marked, steps_done, wait_for
from test_ray_runtime import carry, small

from headrace.actors.outbox import Outbox
from headrace.deploy.ray_launches import Launches
from headrace.deploy.ray_parts import end_actor, placed
from headrace.deploy.runtime_ray import RayRuntime
from headrace.platform.errors import DeadlineExceeded, RunFailed
from headrace.platform.records.delivery import Outcome, Submission
from headrace.platform.records.ids import AttemptId
from headrace.platform.records.status import Fate
from headrace.platform.store.episodes import EpisodeStore
from headrace.platform.store.events import Events, RunEvent
from headrace.platform.store.tables import FateTable
from headrace.platform.testing.failpoints import FOLDER_VARIABLE, arm
from headrace.platform.testing.kills.audit import audit
from headrace.serving.replica_actor import ReplicaActor

pytestmark = pytest.mark.timeout(300)
WAIT_S = 150.0
PARTS = ("learner", "rollout-0", "replica-0", "server")


class Killing(RayRuntime):
    """Kills `victims` after learner step `at`, once. `pids` are those of the victims."""

    victims: tuple[str, ...] = ()
    sends = signal.SIGKILL
    at = 2
    killed_s = 0.0
    pids: ClassVar[list[int]] = []

    async def step(self):
        report = await super().step()
        if not self.killed_s and report.step == self.at:
            for victim in self.victims:
                self.pids.append(await self.pid_of(victim))
                os.kill(self.pids[-1], self.sends)
            type(self).killed_s = time.monotonic()
        return report

    async def pid_of(self, part: str) -> int:
        if part == "server":
            return self._server.pid
        actor = ray.get_actor(part, namespace=self._parts.namespace)
        return await actor.__ray_call__.remote(lambda _: os.getpid())


def killing(*parts: str, of: type[Killing] = Killing, **changes) -> type[Killing]:
    return type("Killing", (of,), {"victims": parts, **changes})


def assert_unharmed(summary, context, deaths: dict[str, int]) -> None:
    """Nothing that counts shows that anything died."""
    assert summary["restarts"] == deaths
    assert summary["equation_holds"] and summary["fates"]["in_flight"] == 0  # P3
    found = audit(context.root, summary)
    assert found.holds, found
    assert found.trained == summary["fates"]["trained"] > 0


class InTurn(Killing):
    """Sends its signal to one part after each of some learner steps; none of them goes on before the part is back."""

    turns: ClassVar[dict[int, str]] = {}

    async def step(self):
        report = await super().step()
        if victim := self.turns.pop(report.step, ""):
            self.pids.append(await self.pid_of(victim))
            os.kill(self.pids[-1], self.sends)
            if victim != "learner":  # that one is missed by the next step
                await self.back(victim)
        return report

    async def back(self, part: str):
        async with asyncio.timeout(WAIT_S):
            while part not in happened(self._context, RunEvent.PART_RESTARTED):  # noqa: ASYNC110 - it is in a file
                await asyncio.sleep(0.1)


def happened(context, event: RunEvent) -> list[str]:
    """The parts to which that happened, each time."""
    return [each["part"] for each in Events(context.root, time.time).read() if each["event"] == event]


async def test_parts_that_are_killed_come_again(ray_session, lookup_model, tmp_path):
    """One after the other: a learner that has no checkpoint yet, and a replica."""
    config = small(lookup_model, tmp_path, "learner.steps=6", "learner.checkpoint_every=5")
    in_turn = killing(of=InTurn, turns={2: "learner", 4: "replica-0"})
    summary, context = await carry(config, in_turn)
    assert not in_turn.turns and summary["learner_steps"] == 6
    assert_unharmed(summary, context, {"learner": 1, "replica-0": 1})
    for event in (RunEvent.PART_DIED, RunEvent.PART_RESTARTED):
        assert happened(context, event) == ["learner", "replica-0"]


async def test_all_at_once(ray_session, lookup_model, tmp_path):
    config = small(lookup_model, tmp_path, "learner.steps=6", "learner.checkpoint_every=1", "rollout.workers=2")
    summary, context = await carry(config, killing(*PARTS, "rollout-1"))
    assert summary["learner_steps"] == 6
    assert_unharmed(summary, context, dict.fromkeys([*PARTS, "rollout-1"], 1))


async def test_a_server_that_comes_back_without_its_last_writes(ray_session, lookup_model, tmp_path):  # case Q21
    """P8: the ledger is rebuilt from the manifests, which voids the learner's fence; it goes on from its checkpoint.
    First some of the writes are lost, then all."""

    class Forgetful(InTurn):
        kept: ClassVar = [0.6, 0.0]

        async def pid_of(self, part):
            pid, kept = await super().pid_of(part), self.kept.pop(0)
            os.kill(pid, signal.SIGKILL)
            for file in self._context.local("queue").glob("appendonlydir/*.incr.aof"):
                os.truncate(file, int(file.stat().st_size * kept))
            return pid

        async def back(self, part):
            """The next step finds out that it is away."""

    config = small(lookup_model, tmp_path, "learner.steps=8", "learner.checkpoint_every=3")
    losing = killing(of=Forgetful, turns={5: "server", 7: "server"})
    summary, context = await carry(config, losing)
    assert not losing.turns and not losing.kept
    assert summary["ledger_epoch"] == 2 and summary["learner_steps"] == 8
    assert_unharmed(summary, context, {"server": 2})


async def test_one_of_two_replicas(ray_session, lookup_model, tmp_path):  # case S5
    config = small(lookup_model, tmp_path, "learner.steps=6", "serving.replicas=2")
    summary, context = await carry(config, killing("replica-1"))
    assert_unharmed(summary, context, {"replica-1": 1})


async def test_an_evaluation_in_which_a_worker_dies_is_played_again(ray_session, lookup_model, tmp_path):
    class KillingInEvaluation(Killing):
        async def evaluate(self, version, *rest):
            playing = asyncio.ensure_future(super().evaluate(version, *rest))
            if not self.killed_s:
                type(self).killed_s = time.monotonic()
                os.kill(await self.pid_of("rollout-0"), signal.SIGKILL)
            return await playing

    summary, context = await carry(small(lookup_model, tmp_path, "eval.tasks=64"), KillingInEvaluation)
    assert_unharmed(summary, context, {"rollout-0": 1})
    assert 0.1 < summary["success_before"] < 0.6


class Snapshot(Launches):
    """Keeps what worker 0 left in its outbox when it died."""

    left: tuple[Submission, ...] = ()

    async def _bring_up_worker(self, index, actor):
        if index == 0 and index in self._holders:
            outbox = Outbox(self._context.local("outbox") / "rollout-0", self._context.run)
            self.left = tuple(entry.submission for entry in outbox.entries())
        await super()._bring_up_worker(index, actor)


class DyingBeforeThePut(RayRuntime):
    """Worker 0 dies between its outbox and its put. No learner step is taken until it is back, so that nothing is too
    old by then."""

    def __init__(self, context):
        super().__init__(context)
        self._parts = type(self).parts = Snapshot(self._supervision)

    async def step(self):
        report = await super().step()
        if report.step == 2:
            folder = str(self.folder)
            actor = ray.get_actor("rollout-0", namespace=self._parts.namespace)
            await actor.__ray_call__.remote(lambda _: os.environ.update({FOLDER_VARIABLE: folder}))
            arm(self.folder, "after_outbox")
            async with asyncio.timeout(WAIT_S):
                while self._parts.workers[0].launch == 1:  # noqa: ASYNC110 - the watch of the run finds it dead
                    await asyncio.sleep(0.1)
        return report


async def test_what_a_dead_worker_had_finished_is_put_before_its_groups_are_given_up(
    ray_session, lookup_model, tmp_path
):
    """P11, P2: else the other worker, which has places free and would wait for nothing, played it once more."""
    config = small(
        lookup_model, tmp_path, "learner.steps=4", "rollout.workers=2", "queue.dispatch_lease_s=120", "queue.max_lag=8"
    )
    dying = type("Dying", (DyingBeforeThePut,), {"folder": tmp_path.parent / f"{tmp_path.name}-points"})
    summary, context = await carry(config, dying)
    assert_unharmed(summary, context, {"rollout-0": 1})
    finished = [put.attempt_id for put in dying.parts.left if put.outcome is Outcome.DONE]
    assert finished, "the last of them was not put: the worker died first"
    fates = FateTable(context.root).by_episode()
    assert {fates[str(attempt)].fate for attempt in finished} <= {Fate.TRAINED, Fate.DROPPED}
    stored = Counter(each.episode_id for each in EpisodeStore(context.root).iterate())
    slots = {(attempt.group, attempt.sample) for attempt in finished}
    played = [name for name in fates if (AttemptId.parse(name).group, AttemptId.parse(name).sample) in slots]
    assert sorted(played) == sorted(map(str, finished)), "no slot had another attempt"
    assert {stored[name] for name in played} == {1}


class TestTheEnd:
    """Case E9: nobody waits for ever."""

    @pytest.mark.parametrize("part", ["rollout-0", "learner", "server"])
    async def test_without_restarts_it_comes_within_seconds(self, part, ray_session, lookup_model, tmp_path):
        config = small(lookup_model, tmp_path, "learner.steps=2000", "learner.lr=1e-9", "runtime.max_restarts=0")
        ending = killing(part)
        with pytest.raises(RunFailed, match=f"^{part} died: "):
            await carry(config, ending)
        assert ending.killed_s
        (root,) = tmp_path.iterdir()
        left = json.loads((root / "summary.json").read_text())
        assert left["failed"].startswith(f"{part} died: ")
        told = {each["event"]: each["time_s"] for each in Events(str(root), time.time).read()}
        assert told[RunEvent.ENDED] - told[RunEvent.PART_DIED] < 5.0

    async def test_all_workers(self, ray_session, lookup_model, tmp_path):
        changes = ("learner.steps=2000", "learner.lr=1e-9", "runtime.max_restarts=0", "rollout.workers=2")
        ending = killing("rollout-0", "rollout-1")
        with pytest.raises(RunFailed, match=r"^rollout-. died: "):
            await carry(small(lookup_model, tmp_path, *changes), ending)
        assert time.monotonic() - ending.killed_s < 15.0

    async def test_dying_again_and_again_without_a_step(self, ray_session, lookup_model, tmp_path):
        class Mortal(Killing):
            async def step(self):
                for actor in ("learner", "learner-2"):
                    self.killers.append(asyncio.create_task(self.kill_when_there(actor)))
                return await super().step()

            async def kill_when_there(self, actor):
                while not self.is_there(actor):  # noqa: ASYNC110 - Ray has no event for it
                    await asyncio.sleep(0.05)
                os.kill(await self.pid_of(actor), signal.SIGKILL)

            def is_there(self, actor):
                named = ray.util.list_named_actors(all_namespaces=True)
                return {"name": actor, "namespace": self._parts.namespace} in named

            killers: ClassVar = []

        config = small(lookup_model, tmp_path, "runtime.max_restarts=1", "learner.batch_groups=64")
        with pytest.raises(RunFailed, match="learner died 2 times without a learner step in between; the last time: "):
            await carry(config, Mortal)

    async def test_another_learner_has_taken_the_run(self, ray_session, lookup_model, tmp_path):  # case Q18
        class Usurped(RayRuntime):
            async def step(self):
                report = await super().step()
                if report.step == 2:
                    await self._ledger.acquire_learner("the learner of somebody else", takeover=True)
                return report

        with pytest.raises(RunFailed, match="another learner has taken the run: the learner of somebody else"):
            await carry(small(lookup_model, tmp_path, "learner.steps=8"), Usurped)
        (root,) = tmp_path.iterdir()
        assert not json.loads((root / "summary.json").read_text())["restarts"]


async def test_no_node_has_room(ray_session):  # P23
    actor = ReplicaActor.options(num_cpus=512).remote()
    try:
        with pytest.raises(DeadlineExceeded, match=r"no node had a free CPU for replica-7 within 1 s: .* 8 CPUs left"):
            await placed("replica-7", actor, 1.0)
    finally:
        end_actor(actor)


@pytest.fixture
def ray_folder():
    """A short folder of its own for Ray's sockets; its path marks every process of that Ray."""
    with tempfile.TemporaryDirectory(prefix="hr-", dir="/tmp") as folder:
        yield folder


def begin(tmp_path, ray_folder: str, mark: str, model):
    env = environment(**{MARK: mark, "RAY_TMPDIR": ray_folder})
    arguments = ("train", "lookup-slow", f"runs_dir={tmp_path / 'runs'}", "--json", *given(model))
    return start(tmp_path, *arguments, env=env)


@pytest.mark.parametrize("name", ["gcs_server", "raylet"])
def test_ray_itself_is_gone(name, lookup_model, tmp_path, ray_folder):
    """Left to itself, Ray ends the driver after 15 to 60 seconds, without a word."""
    mark, runs = f"{os.getpid()}-{name}", tmp_path / "runs"
    process = begin(tmp_path, ray_folder, mark, lookup_model)
    wait_for(lambda: steps_done(runs) >= 2, WAIT_S, process)
    (victim,) = [child for child in psutil.Process(process.pid).children() if child.name() == name]
    victim.kill()
    killed_s = time.monotonic()
    code, err, left = ended(process, mark)
    assert code == 1, err[-3000:]
    assert time.monotonic() - killed_s < 30.0
    assert not left
    (run,) = runs.iterdir()
    summary = json.loads((run / "summary.json").read_text())
    assert f"headrace train --resume {run.name}" in summary["failed"]
    assert f"({'GCS' if name == 'gcs_server' else 'raylet'})" in summary["failed"]
    assert summary["equation_holds"]


def test_a_killed_process_group_leaves_nobody_behind(lookup_model, tmp_path, ray_folder):  # case X17
    mark, runs = f"{os.getpid()}-group", tmp_path / "runs"
    process = begin(tmp_path, ray_folder, mark, lookup_model)
    wait_for(lambda: steps_done(runs) >= 1, WAIT_S, process)
    assert len(marked(mark)) > 5, "Ray, its workers and the server bear the mark"
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    try:
        wait_for(lambda: not marked(mark), 15.0)
    finally:
        for pid in marked(mark):
            os.kill(pid, signal.SIGKILL)
