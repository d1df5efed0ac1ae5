"""A rollout worker over a real ledger, store, outbox and episode loop, with worlds and engines that misbehave."""

import asyncio

from episode_kit import DONE, ends, says

from headrace.actors.delivery import Delivery
from headrace.actors.environments.registry import ENVIRONMENTS, EnvironmentKind
from headrace.actors.outbox import Outbox
from headrace.actors.worker import RolloutWorker, WorkerSettings
from headrace.actors.worlds import Worlds
from headrace.platform.config.environments import EnvironmentConfig, SamplingConfig
from headrace.platform.errors import EnvironmentFault
from headrace.platform.ledger.memory import MemoryLedger
from headrace.platform.ledger.patient import PatientLedger
from headrace.platform.observability.parts import Part
from headrace.platform.records import Task
from headrace.platform.records.delivery import CommitRequest, LedgerLimits
from headrace.platform.store.episodes import EpisodeStore
from headrace.platform.store.tables import RewardTable
from headrace.platform.testing.fakes.renderer import CharRenderer
from headrace.platform.testing.fakes.tasks import ListTasks

RUN = "kit-run"
SIZE = 4


class Bench:
    """A worker and everything around it. `make` builds the n-th world; worlds count what happens to them."""

    def __init__(
        self,
        tmp_path,
        monkeypatch,
        make,
        *,
        engine=None,
        max_episodes=8,
        limits=None,
        ledger=MemoryLedger,
        patience_s=None,
        scorer=None,
        **settings,
    ):
        self.worlds = []
        self.clock = 100.0
        values = {"batch_groups": 2, "max_lag": 1, "drop_zero_variance": False, "max_attempts": 3, **(limits or {})}
        self.ledger = ledger(RUN, LedgerLimits(**values), lambda: self.clock)
        self.said = []
        self.waiting = PatientLedger(self.ledger, patience_s, self.said.append) if patience_s else self.ledger
        self.tmp_path = tmp_path
        self.engine = engine or says(DONE)
        self.store = EpisodeStore(str(tmp_path))
        self.rewards = RewardTable(str(tmp_path), "rollout-0")
        self.fence = 0

        def build(args):
            world = make(len(self.worlds) - 2)  # two are built and thrown away, to check the recipe
            self.worlds.append(world)
            return world

        self.tasks = [Task(f"{split}{n}", "kit", split=split) for n in range(50) for split in ("train", "dev")]
        kind = EnvironmentKind(environment=build, tasks=lambda split, seed, args: ListTasks(self.tasks, split, seed))
        monkeypatch.setitem(ENVIRONMENTS, "kit", kind)
        config = EnvironmentConfig(
            name="kit", sampling=SamplingConfig(max_new_tokens=50), reset_deadline_s=5, step_deadline_s=5
        )
        self.evaluation_worlds = {split: Worlds([config], split, 0) for split in ("train", "dev")}
        self.settings = {
            "run": RUN,
            "worker_id": "rollout-0",
            "policy_id": "scripted",
            "group_size": SIZE,
            "max_episodes": max_episodes,
            "request_deadline_s": 5.0,
            "idle_s": 0.001,
            "renew_every_s": 0.01,
            "confirm_every_s": 0.01,
            **settings,
        }
        self.scorer = scorer
        self.part = Part(str(tmp_path), "rollout-0")
        self.worker = self.another()

    def another(self, ledger=None, **settings):
        """A worker like the first, as a process that was started anew: its outbox is on the same disk."""
        worlds = self.evaluation_worlds
        return RolloutWorker(
            WorkerSettings(**{**self.settings, **settings}),
            worlds["train"],
            CharRenderer(),
            self.engine,
            lambda: max(self.engine.versions(), default=None),
            Delivery(
                ledger=ledger or self.waiting,
                store=self.store,
                rewards=self.rewards,
                worker_id="rollout-0",
                outbox=Outbox(self.tmp_path / "outbox", RUN),
            ),
            worlds.__getitem__,
            {"kit": self.scorer} if self.scorer else None,
            part=self.part,
        )

    async def publish(self, batches=1):
        """A new version, so many batches after the head."""
        if not self.fence:
            self.fence = await self.ledger.acquire_learner("test")
        head = (await self.ledger.stats()).head
        number = await self.ledger.stage(self.fence)
        await self.ledger.commit(
            CommitRequest(
                fence=self.fence,
                number=number,
                parent=-1 if head is None else head,
                content_hash=f"h{number}",
                batches=0 if head is None else batches,
                fates={},
            )
        )
        return number

    async def until(self, holds):
        """Let the loops run until `holds(stats)`."""
        async with asyncio.timeout(10):
            while not holds(await self.ledger.stats()):
                await asyncio.sleep(0.002)
                self.worker.stats()

    async def comes(self, holds):
        """Let the loops run until `holds()`."""
        await self.until(lambda stats: holds())

    @property
    def used(self):
        """The worlds that episodes were played in."""
        return [world for world in self.worlds if getattr(world, "resets", None) or world.closed]

    async def check_closed(self):
        """After worker and ledger have stopped: the equation holds, nothing is in flight, nothing is left behind."""
        assert self.worker.stats().running == 0
        assert (await self.ledger.stats()).groups_open == 0, "the worker left a slot running"
        await self.ledger.stop("test")
        stats = await self.ledger.stats()
        assert stats.holds
        assert stats.fates["in_flight"] == 0
        assert self.engine.sessions(0) == 0
        assert all(world.closed for world in self.used)
        return stats


def down(*_):
    raise EnvironmentFault("down")


def flaky_third(n):
    if n % 3 == 0:
        raise EnvironmentFault("lost")
    return ends(float(n % 2))


def no_task_left(before):
    """Names of the tasks that are running now and were not before, this one apart."""
    return {task.get_name() for task in asyncio.all_tasks() - before - {asyncio.current_task()}}
