"""A replica follows the published versions."""

import asyncio
import contextlib
import itertools
import logging

import pytest

from headrace.platform.errors import EngineDead, EngineError, LedgerAway, NotFound, VersionUnavailable
from headrace.platform.ledger.memory import MemoryLedger
from headrace.platform.records.delivery import CommitRequest, LedgerLimits
from headrace.platform.records.generation import GenerationRequest, SamplingParams
from headrace.platform.records.versions import VersionManifest, VersionRef
from headrace.platform.registry.memory import MemoryRegistry
from headrace.platform.testing.fakes.engine import ScriptedEngine
from headrace.serving.replica import Replica

FAST = {"poll_s": 0.01, "retry_s": 0.01}


class Publisher:
    """Commits versions through a real ledger and registry."""

    def __init__(self):
        ticks = itertools.count()
        self.ledger = MemoryLedger("run", LedgerLimits(batch_groups=1, max_lag=4), lambda: float(next(ticks)))
        self.registry = MemoryRegistry(self.ledger)
        self.fence = None
        self.parent = -1

    async def publish(self) -> int:
        manifest = await self.declare()
        number = manifest.ref.number
        commit = CommitRequest(
            fence=self.fence,
            number=number,
            parent=self.parent,
            content_hash=manifest.content_hash,
            batches=0,
            fates={},
        )
        await self.ledger.commit(commit)
        self.parent = number
        return number

    async def declare(self) -> VersionManifest:
        """A manifest that is not committed."""
        if self.fence is None:
            self.fence = await self.ledger.acquire_learner("test")
        number = await self.ledger.stage(self.fence)
        path, files, content = await self.registry.stage(number, self.fence, {"weights": b"%d" % number})
        manifest = VersionManifest(
            ref=VersionRef("policy", number),
            parent=self.parent,
            parent_hash="",
            fence=self.fence,
            kind="full",
            content_hash=content,
            batches=0,
            path=path,
            files=files,
        )
        await self.registry.manifest(manifest)
        return manifest


class RecordingEngine(ScriptedEngine):
    """A scripted engine that writes down what was loaded, and whose loads can be made to fail or hang."""

    def __init__(self):
        super().__init__(lambda request: [1], versions=())
        self.loads: list[int] = []
        self.fail = 0
        self.hang = False
        self.asked = asyncio.Event()

    async def load(self, manifest, path):
        self.loads.append(manifest.ref.number)
        self.asked.set()
        if self.hang:
            await asyncio.Event().wait()
        if self.fail:
            self.fail -= 1
            raise EngineError("half of it is missing")
        await super().load(manifest, path)


class Following:
    """A replica under way, with what it announced."""

    def __init__(self, engine, registry, keep=2, **options):
        self.announced: list[list[int]] = []
        self.changed = asyncio.Event()
        self.engine = engine
        self.replica = Replica(engine, "r0", **{**FAST, **options})
        self.task = asyncio.ensure_future(self.replica.follow(registry, keep, self._on_change))

    def _on_change(self):
        self.announced.append(list(self.engine.versions()))
        self.changed.set()

    async def holds(self, versions):
        while list(self.engine.versions()) != versions or self.announced[-1:] != [versions]:
            self.changed.clear()
            await asyncio.wait_for(self.changed.wait(), 10)

    async def stop(self):
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.task


@pytest.fixture
async def publisher():
    return Publisher()


def request(session, version):
    return GenerationRequest("k", session, None, version, 0, SamplingParams())


async def test_new_versions_are_loaded_and_announced(publisher):
    following = Following(RecordingEngine(), publisher.registry)
    for held in ([0], [0, 1]):
        await publisher.publish()
        await following.holds(held)
    assert following.announced == [[0], [0, 1]]
    await following.stop()


async def test_a_restarted_replica_waits_for_a_committed_version(publisher):  # case S6
    """It holds nothing, so it is asked for nothing, until a version is committed: a manifest alone is not enough."""
    following = Following(RecordingEngine(), publisher.registry)
    await publisher.declare()
    assert await publisher.registry.watch(-1, 0.05) is None
    assert (following.announced, following.engine.loads) == ([], [])
    committed = await publisher.publish()
    await following.holds([committed])
    assert following.engine.loads == [committed]
    await following.stop()


async def test_intermediate_versions_are_skipped(publisher):  # P22
    for _ in range(4):
        await publisher.publish()
    following = Following(RecordingEngine(), publisher.registry)
    await following.holds([3])
    assert following.engine.loads == [3]
    await following.stop()


async def test_old_versions_stay_while_a_session_uses_them(publisher):
    engine = RecordingEngine()
    following = Following(engine, publisher.registry, keep=1)
    await publisher.publish()
    await following.holds([0])
    await engine.generate(request("s", 0))
    await publisher.publish()
    await following.holds([0, 1])
    await engine.release("s")
    await following.holds([1])
    await following.stop()


async def test_a_failed_load_is_tried_again(publisher, caplog):  # case S4
    engine = RecordingEngine()
    following = Following(engine, publisher.registry)
    await publisher.publish()
    await following.holds([0])
    engine.fail = 2
    with caplog.at_level(logging.WARNING):
        await publisher.publish()
        await following.holds([0, 1])
    assert engine.loads == [0, 1, 1, 1]
    assert following.replica.failures == 2
    assert "half of it is missing" in following.replica.last_failure
    assert "half of it is missing" in caplog.text
    await following.stop()


async def test_a_newer_version_ends_the_retries(publisher):
    engine = RecordingEngine()
    engine.fail = 1
    following = Following(engine, publisher.registry, retry_s=60.0)
    await publisher.publish()
    await engine.asked.wait()
    await publisher.publish()
    await following.holds([1])
    assert engine.loads == [0, 1]
    await following.stop()


async def test_a_load_that_hangs_meets_its_deadline(publisher):
    engine = RecordingEngine()
    engine.hang = True
    following = Following(engine, publisher.registry, control_deadline_s=0.05, retry_s=60.0)
    await publisher.publish()
    await engine.asked.wait()
    engine.hang = False
    await publisher.publish()
    await following.holds([1])
    assert following.replica.failures == 1
    assert "0.05 s" in following.replica.last_failure
    await following.stop()


async def test_a_registry_that_is_away_is_asked_again(publisher):
    class Flaky:
        away = 2

        async def watch(self, after, timeout_s):
            if self.away:
                self.away -= 1
                raise LedgerAway("connection refused")
            return await publisher.registry.watch(after, timeout_s)

        open = publisher.registry.open
        pin = publisher.registry.pin
        unpin = publisher.registry.unpin

    following = Following(RecordingEngine(), Flaky())
    await publisher.publish()
    await following.holds([0])
    assert following.replica.failures == 2
    await following.stop()


async def test_a_disk_that_fails_for_once_ends_nothing(publisher):
    class Flaky:
        failing = 1

        async def open(self, number):
            if self.failing:
                self.failing -= 1
                raise PermissionError("the share is away")
            return await publisher.registry.open(number)

        watch = publisher.registry.watch
        pin = publisher.registry.pin
        unpin = publisher.registry.unpin

    following = Following(RecordingEngine(), Flaky())
    await publisher.publish()
    await following.holds([0])
    assert following.replica.failures == 1 and "the share is away" in following.replica.last_failure
    await following.stop()


async def test_a_dead_engine_ends_the_following(publisher):
    engine = RecordingEngine()
    following = Following(engine, publisher.registry)
    await engine.close()
    await publisher.publish()
    with pytest.raises(EngineDead):
        await asyncio.wait_for(following.task, 10)


# --- pins (P12, case Q17) ---


async def test_what_is_held_cannot_be_removed(publisher):  # case Q17
    following = Following(RecordingEngine(), publisher.registry, keep=1)
    for version in (0, 1, 2):
        await publisher.publish()
        await following.holds([version])
    assert await publisher.registry.retain([], newest=0) == [0, 1]
    await following.stop()


async def test_a_version_is_pinned_before_it_is_opened(publisher):  # case Q17
    class Slow:
        async def open(self, version):
            assert await publisher.registry.retain([], newest=0) == []
            return await publisher.registry.open(version)

        def __getattr__(self, name):
            return getattr(publisher.registry, name)

    await publisher.publish()
    following = Following(RecordingEngine(), Slow())
    await following.holds([0])
    await following.stop()


async def test_a_failed_load_gives_its_pin_back(publisher):
    engine = RecordingEngine()
    engine.fail = 1
    following = Following(engine, publisher.registry, retry_s=60.0)
    await publisher.publish()
    await engine.asked.wait()
    await publisher.publish()
    await following.holds([1])
    assert await publisher.registry.retain([], newest=0) == [0]
    await following.stop()


async def test_whoever_has_lost_a_version_serves_it_no_further(publisher):  # P12, case Q17
    """The replica was stopped for longer than its pin, and the version was removed meanwhile: a session that is on it
    is refused from then on, and the newest version stays."""

    class Removed:
        """A registry in which version 0 is gone."""

        gone = asyncio.Event()

        async def pin(self, version, holder, ttl_s):
            if version == 0 and self.gone.is_set():
                raise NotFound("the files of version 0 were removed")
            await publisher.registry.pin(version, holder, ttl_s)

        def __getattr__(self, name):
            return getattr(publisher.registry, name)

    registry, engine = Removed(), RecordingEngine()
    following = Following(engine, registry, keep=2, pin_ttl_s=0.3)
    for held in ([0], [0, 1]):
        await publisher.publish()
        await following.holds(held)
    await engine.generate(request("s", 0))
    registry.gone.set()
    await following.holds([1])
    with pytest.raises(VersionUnavailable):
        await engine.generate(request("s", 0))
    await following.stop()


async def test_an_evaluation_does_not_ask_for_ever_for_what_is_gone(publisher):
    await publisher.publish()
    await publisher.publish()
    assert await publisher.registry.retain([], newest=1) == [0]
    following = Following(RecordingEngine(), publisher.registry)
    following.replica.held.add(0)
    await following.holds([1])
    assert not following.replica.held
    assert "were removed" in following.replica.last_failure
    await following.stop()


async def test_a_server_that_stays_away_ends_the_pins_in_time(publisher):  # P12
    class Away:
        away = False

        def __getattr__(self, name):
            async def call(*arguments):
                if self.away:
                    raise LedgerAway("connection refused")
                return await getattr(publisher.registry, name)(*arguments)

            return call

    registry = Away()
    following = Following(RecordingEngine(), registry, pin_ttl_s=0.3)
    await publisher.publish()
    await following.holds([0])
    registry.away = True
    await following.holds([])
    registry.away = False
    await following.holds([0])
    assert following.engine.loads == [0, 0]
    await following.stop()
