"""A ledger whose server came back is trusted again, or rebuilt from the run root (P8, P12; case Q21)."""

import itertools

import pytest
from chain_kit import row

from headrace.platform.errors import CommitRefused, Fenced, LedgerAway, LedgerRewound
from headrace.platform.ledger.memory import MemoryLedger
from headrace.platform.ledger.policy import NO_VERSION
from headrace.platform.ledger.reconcile import reconcile
from headrace.platform.records.delivery import ChainGroup, ChainMember, LeasedGroup
from headrace.platform.records.versions import VersionManifest, VersionRef
from headrace.platform.registry.memory import MemoryRegistry
from headrace.platform.testing.conformance.ledger_harness import LedgerHarness, limits, numbers

LIMITS = limits(batch_groups=1, max_lag=4, min_group=2)


class World:
    """A run in one process: version 0 is published and settled, and a learner trains one group of two a version."""

    def __init__(self, chosen=LIMITS):
        ticks = itertools.count(1)
        self.limits = chosen
        self.ledger = MemoryLedger("r", chosen, lambda: float(next(ticks)))
        self.registry = MemoryRegistry(self.ledger)
        self.h = LedgerHarness(ledger=self.ledger, run="r", advance=None)
        self.checkpoints = []
        self.rows = []
        self.manifests = {}
        self.head = NO_VERSION
        self.fence = 0

    async def begin(self) -> "World":
        self.fence = await self.ledger.acquire_learner("learner")
        await self.publish([])
        await self.settle()
        return self

    async def settle(self):
        await self.ledger.settle(self.fence, self.head)
        self.checkpoints.append(self.head)

    async def leased(self) -> list[LeasedGroup]:
        await self.h.ready(self.head, 1)
        return list(await self.ledger.lease(self.fence, self.head, 0, 1))

    async def publish(self, groups) -> int:
        """Manifest, then commit."""
        request = await self.declare(groups)
        await self.ledger.commit(request)
        self.head = request.number
        return request.number

    async def declare(self, groups):
        """The manifest of the next version; returns the commit that belongs to it."""
        number = await self.ledger.stage(self.fence, await self.registry.highest_number() + 1)
        request = self.h.request(self.fence, number, self.head, groups, batches=1 if groups else 0)
        parent = self.manifests.get(self.head)
        self.manifests[number] = VersionManifest(
            ref=VersionRef("policy", number, self.fence),
            parent=None if parent is None else self.head,
            parent_hash="" if parent is None else parent.content_hash,
            fence=self.fence,
            kind="full",
            content_hash=request.content_hash,
            batches=0 if parent is None else parent.batches + request.batches,
            path="",
            consumed=request.fates,
            groups=tuple(chain_group(group, number) for group in groups),
        )
        await self.registry.manifest(self.manifests[number])
        return request

    async def train(self) -> int:
        return await self.publish(await self.leased())

    async def reconcile(self) -> bool:
        return await reconcile(
            self.ledger,
            self.registry,
            limits=self.limits,
            checkpoints=lambda: self.checkpoints,
            fate_rows=lambda: self.rows,
            group_size=2,
            sequence=0,
        )

    async def resume(self, version):
        self.fence = await self.ledger.acquire_learner("learner")
        await self.ledger.settle(self.fence, version)
        await self.ledger.rollback(self.fence, version)
        self.head = version


def chain_group(group: LeasedGroup, by: int) -> ChainGroup:
    return ChainGroup(
        group=group.group,
        position=group.group,
        size=2,
        version=group.version,
        consumed_by=by,
        members=tuple(
            ChainMember(
                sample=member.attempt_id.sample,
                attempt=member.attempt_id.attempt,
                fate="trained",
                payload_hash=member.payload_hash,
                store_file=member.store_file,
                score=member.score,
                oldest_version=member.oldest_version,
                newest_version=member.newest_version,
            )
            for member in group.members
        ),
    )


@pytest.fixture
async def world():
    return await World().begin()


async def test_a_server_that_lost_nothing_is_trusted_again(world):  # P12
    groups = await world.leased()
    await world.ledger.restart()
    with pytest.raises(LedgerRewound):
        await world.ledger.extend(world.fence, numbers(groups))
    assert await world.reconcile() is False
    await world.publish(groups)
    assert (await world.h.stats()).epoch == 0
    await world.h.expect_fates(trained=2)


async def test_a_lost_commit_is_known_again(world):  # case Q21
    groups = await world.leased()
    before = await world.ledger.mark()
    version = await world.publish(groups)
    await world.ledger.rewind(before)
    with pytest.raises(LedgerRewound):
        await world.ledger.stage(world.fence)
    assert await world.reconcile() is True
    stats = await world.h.stats()
    assert (stats.head, stats.epoch, stats.groups_consumed) == (version, 1, 1)
    await world.h.expect_fates(trained=2)
    with pytest.raises(Fenced):
        await world.ledger.stage(world.fence)


async def test_what_was_not_settled_comes_again_after_a_loss(world):  # P5, P6
    await world.train()
    await world.settle()
    groups = await world.leased()
    before = await world.ledger.mark()
    lost = await world.publish(groups)
    await world.ledger.rewind(before)
    assert await world.reconcile()
    await world.resume(world.checkpoints[-1])
    again = await world.ledger.lease(world.fence, world.head, 0, 1)
    assert numbers(again) == numbers(groups)
    assert await world.publish(again) > lost
    await world.h.expect_fates(trained=4)


async def test_an_empty_server_learns_everything_from_the_run_root(world):  # P8
    first = await world.train()
    await world.settle()
    groups = await world.leased()
    second = await world.publish(groups)
    world.rows = [row(0, 0, "trained", first), row(0, 1, "trained", first)]
    await world.h.admit(second, 1)
    await world.ledger.wipe()
    assert await world.reconcile()
    stats = await world.h.stats()
    assert (stats.head, stats.dispatch_sequence, stats.groups_consumed) == (second, 2, 1)
    await world.h.expect_fates(trained=4)
    await world.resume(first)
    await world.h.expect_fates(trained=2, in_flight=2)
    again = await world.ledger.lease(world.fence, first, 0, 1)
    assert [member.attempt_id for member in again[0].members] == [member.attempt_id for member in groups[0].members]
    await world.publish(again)
    await world.h.expect_fates(trained=4)


async def test_a_version_that_was_declared_and_never_committed_is_adopted_once(world):
    """The learner dies after the manifest, and the server loses its last writes: the manifest is the truth (P8)."""
    groups = await world.leased()
    before = await world.ledger.mark()
    request = await world.declare(groups)
    await world.ledger.rewind(before)
    assert await world.reconcile()
    assert (await world.h.stats()).head == request.number
    await world.ledger.commit(request)  # the same commit again is the same commit (P7)
    await world.h.expect_fates(trained=2)
    await world.resume(0)
    assert numbers(await world.ledger.lease(world.fence, 0, 0, 1)) == numbers(groups)


async def test_a_version_that_the_ledger_refused_is_never_adopted():  # P7, P14
    world = await World(limits(batch_groups=1, max_lag=0, min_group=2)).begin()
    old = await world.leased()
    head = await world.publish(old)
    request = await world.declare(old)
    with pytest.raises(CommitRefused):
        await world.ledger.commit(request)
    await world.ledger.restart()
    assert await world.reconcile() is False, "the newest version that counts is known"
    await world.ledger.wipe()
    assert await world.reconcile()
    stats = await world.h.stats()
    assert stats.head == head
    assert await world.registry.highest_number() == request.number
    await world.resume(head)
    assert await world.ledger.stage(world.fence) > request.number


async def test_each_rebuilding_is_a_new_epoch(world):
    for epoch in (1, 2):
        await world.ledger.wipe()
        assert await world.reconcile()
        assert (await world.h.stats()).epoch == epoch
    assert await world.reconcile() is False


async def test_before_the_first_version_there_is_nothing_to_lose():
    world = World()
    await world.ledger.restart()
    assert await world.reconcile() is False
    await world.begin()


async def test_after_a_crash_it_is_done_again(world):
    """The server goes away between the claim and the end; the next try claims another epoch."""
    before = await world.ledger.mark()
    await world.train()
    await world.ledger.rewind(before)
    answer, world.ledger.reconcile = world.ledger.reconcile, gone
    with pytest.raises(LedgerAway):
        await world.reconcile()
    world.ledger.reconcile = answer
    assert await world.reconcile()
    assert (await world.h.stats()).epoch == 2


async def gone(chain):
    raise LedgerAway("the server is away")
