"""What a publisher writes, under which number, what it keeps, and where it goes back to (P5, P6, P8, P13)."""

import hashlib

import pytest
from learner_kit import RUN, World

from headrace.platform.errors import CommitRefused, RunFailed
from headrace.platform.ledger.policy import VersionNode
from headrace.platform.records.delivery import ChainGroup, ChainMember
from headrace.trainer.checkpoint import CheckpointState
from headrace.trainer.consumption import NOTHING
from headrace.trainer.publisher import Publisher

FILES = {"config.json": b"{}", "model.safetensors": b"weights"}


async def compute(function, *arguments):
    return function(*arguments)


def publisher(world, **options) -> Publisher:
    given = {
        "ledger": world.ledger,
        "registry": world.registry,
        "checkpoints": world.checkpoints,
        "policy_id": "policy",
        "keep_versions": 1,
        "keep_checkpoints": 2,
        "world_size": 1,
        "clock": world.clock,
        "compute": compute,
    }
    return Publisher(**{**given, **options})


async def taken_over(world, **options) -> Publisher:
    one = publisher(world, **options)
    await one.take_over("learner", True)
    return one


async def publish(one: Publisher, batches: int = 1) -> int:
    number = await one.reserve()
    await one.publish(number, FILES, batches=batches, consumed=NOTHING)
    return number


async def settle(one: Publisher) -> None:
    await one.settle({"state": b"all"}, steps=0)


async def test_the_manifest_says_what_a_ledger_that_lost_everything_must_know(tmp_path):
    """P8: position, size and version of the group; hash, file, score and versions of each member."""
    world = World(tmp_path, batch_groups=1)
    learner = world.learner()
    await learner.start()
    (ticket,) = await world.admit(1, 0, size=3)
    await world.finish(ticket, scores=(1.0, 0.0, 0.5))
    await learner.step()
    (group,) = (await world.registry.manifests())[-1].groups
    first = group.members[0]
    payload = world.stored[f"{RUN}.t0.0.0"]
    assert first == ChainMember(
        sample=0,
        attempt=0,
        fate="trained",
        payload_hash=hashlib.sha256(payload).hexdigest(),
        store_file="episodes/g0.parquet",
        score=1.0,
        oldest_version=0,
        newest_version=0,
        lag=0,
    )
    assert group == ChainGroup(group=0, position=0, size=3, version=0, consumed_by=1, members=group.members)
    assert [(member.sample, member.score) for member in group.members] == [(0, 1.0), (1, 0.0), (2, 0.5)]


async def test_two_unpublished_steps_are_consumed_together(tmp_path):
    """P7: with the lag that each was trained with."""
    world = World(tmp_path, publish_every=2, batch_groups=1)
    learner = world.learner()
    await learner.start()
    await world.play(2, version=0)
    for _ in range(2):
        await learner.step()
    groups = (await world.registry.manifests())[-1].groups
    assert [(group.group, group.consumed_by, group.members[0].lag) for group in groups] == [(0, 1, 0), (1, 1, 1)]


async def test_numbers_are_above_every_blob_and_manifest(tmp_path):
    """P6: a ledger that has forgotten them does not give them out again."""
    world = World(tmp_path)
    await world.registry.stage(7, 0, FILES)
    one = await taken_over(world)
    assert await one.resume() is None
    assert await publish(one, batches=0) == 8
    assert await publish(one) == 9


async def test_a_refused_commit_is_told_as_one_and_moves_no_head(tmp_path):
    """P7: whoever holds the run may go on from the checkpoint, with another learner."""
    world = World(tmp_path)
    one = await taken_over(world)

    async def refused(request):
        raise CommitRefused("parent -1 is not the head, 3")

    world.ledger.commit = refused
    with pytest.raises(CommitRefused, match=r"^version 0 was not accepted: parent -1 is not the head"):
        await publish(one)
    assert (one.head, one.lineage) == (-1, {})


async def test_a_first_version_without_its_checkpoint_begins_again_over_it(tmp_path):
    """P6: its learner died before the checkpoint was whole; the weights get a new number, and lag counts no batch."""
    world = World(tmp_path)
    await publish(await taken_over(world), batches=0)
    await world.ledger.stop("the learner died")
    heir = await taken_over(world)
    assert await heir.resume() is None
    assert heir.head == 0
    assert await publish(heir, batches=0) == 1
    await settle(heir)
    manifest = (await world.registry.manifests())[-1]
    assert (manifest.parent, manifest.batches, manifest.fence) == (0, 0, heir.fence)
    assert manifest.parent_hash == (await world.registry.manifests())[0].content_hash
    (late,) = await world.admit(1, 0)
    assert (late.version, heir.train_start(0).lag(0, 4, 9)) == (0, 0)


async def test_a_manifest_that_was_never_committed_is_passed_over(tmp_path):
    """P6: killed between manifest and commit of version 0."""
    world = World(tmp_path)
    one, commit = await taken_over(world), world.ledger.commit

    async def killed(request):
        raise SystemExit

    world.ledger.commit = killed
    with pytest.raises(SystemExit):
        await publish(one, batches=0)
    world.ledger.commit = commit
    heir = await taken_over(world)
    assert await heir.resume() is None
    assert await publish(heir, batches=0) == 1
    assert (await world.registry.manifests())[-1].parent is None


async def test_a_run_that_has_trained_and_has_no_checkpoint_cannot_be_resumed(tmp_path):
    world = World(tmp_path)
    one = await taken_over(world)
    await publish(one, batches=0)
    await publish(one)
    with pytest.raises(RunFailed, match="has trained and there is no complete checkpoint"):
        await (await taken_over(world)).resume()


async def test_a_checkpoint_that_the_ledger_never_heard_of_is_no_new_run(tmp_path):
    """P8: an empty server is reconciled first; the learner does not begin from the initial weights in silence."""
    world = World(tmp_path)
    state = CheckpointState(version=5, content_hash="h", batches=5, steps=5, dispatch_sequence=9)
    world.checkpoints.write(state, {"state": b"all"})
    with pytest.raises(RunFailed, match="checkpoint of version 5 and the ledger knows no version"):
        await (await taken_over(world)).resume()


async def test_a_checkpoint_of_other_ranks_is_refused(tmp_path):
    """P13: by a message that names both numbers."""
    world = World(tmp_path)
    one = await taken_over(world, world_size=4)
    await publish(one, batches=0)
    await settle(one)
    assert world.checkpoints.latest_complete()[0].world_size == 4
    with pytest.raises(RunFailed, match="is of 4 learner ranks and this learner has 2; resume with 4"):
        await (await taken_over(world, world_size=2)).resume()


async def test_a_half_written_checkpoint_is_passed_over(tmp_path):
    """case Q16: the last complete one counts, and what came after it is an orphan."""
    world = World(tmp_path)
    one = await taken_over(world)
    await publish(one, batches=0)
    await settle(one)
    await publish(one)
    await settle(one)
    (tmp_path / "checkpoints" / "000001" / "state").unlink()
    heir = await taken_over(world)
    state, files = await heir.resume()
    assert (state.version, files, heir.head, heir.batches) == (0, {"state": b"all"}, 0, 0)
    assert (await world.ledger.stats()).head == 0


async def test_a_fenced_learners_late_checkpoint_is_not_gone_back_to(tmp_path):
    """P6: it was stopped in the middle of the checkpoint, lost the run, and finished writing when it woke up."""
    world = World(tmp_path)
    old = await taken_over(world)
    await publish(old, batches=0)
    await settle(old)
    asleep = await publish(old)
    new = await taken_over(world)
    assert (await new.resume())[0].version == 0
    ahead = await publish(new)
    world.checkpoints.write(
        CheckpointState(version=asleep, content_hash="h", batches=1, steps=1, dispatch_sequence=0), {"state": b"old"}
    )
    last = await taken_over(world)
    assert (await last.resume())[0].version == 0
    assert (asleep, ahead, last.head) == (1, 2, 0)


async def test_the_lineage_comes_back_with_its_branches(tmp_path):
    """P14, case Q20: lag of an orphan's tokens is the path through the common ancestor."""
    world = World(tmp_path)
    one = await taken_over(world)
    await publish(one, batches=0)
    await settle(one)
    for _ in range(2):
        await publish(one)
    heir = await taken_over(world)
    await heir.resume()
    assert heir.lineage == {0: VersionNode(-1, 0), 1: VersionNode(0, 1), 2: VersionNode(1, 2)}
    assert await publish(heir) == 3
    start = heir.train_start(ahead=1)
    assert [start.lag(version, 4, 9) for version in (0, 1, 2, 3, 8)] == [2, 3, 4, 1, 9]


async def test_old_checkpoints_go_and_the_weights_of_kept_ones_stay(tmp_path):
    world = World(tmp_path)
    one = await taken_over(world)
    for _ in range(4):
        await publish(one)
        await settle(one)
        await one.retain()
    assert world.checkpoints.complete() == [2, 3]
    heir = await taken_over(world)
    await heir.resume()
    await publish(heir)
    await heir.retain()
    for version, kept in [(0, False), (1, False), (2, True), (3, True), (4, True)]:
        if kept:
            assert (await world.registry.open(version))[0].ref.number == version
        else:
            with pytest.raises(LookupError):
                await world.registry.open(version)
