"""Steps of a learner taken again from manifests, receipts and stored episodes, with lag judgements and rollbacks."""

import pytest
from learner_kit import World, tiny_backend

from headrace.platform.config import GrpoConfig
from headrace.platform.errors import NotFound
from headrace.platform.records.delivery import LedgerLimits
from headrace.platform.registry.hashing import content_hash, file_hashes
from headrace.trainer.algorithms import build_algorithm
from headrace.trainer.one_step import restore_step
from headrace.trainer.step_history import StepHistory
from headrace.trainer.step_replay import StepReplay

KEPT = {"checkpoint_every": 1, "keep_checkpoints": 9, "warmup": 2}


def world_of(tmp_path, **options) -> World:
    return World(tmp_path, **{"batch_groups": 1, **KEPT, **options})


def learner_of(world: World):
    return world.learner(backend=tiny_backend(world.config), algorithm=build_algorithm(GrpoConfig()))


async def history_of(world: World) -> StepHistory:
    queue = world.queue
    limits = LedgerLimits(
        batch_groups=world.config.batch_groups, max_lag=queue.max_lag, mask_over_lag=queue.over_lag == "mask"
    )
    return StepHistory(await world.registry.manifests(), world.receipts, limits)


async def replayed(world: World, begin: int, step: int) -> tuple[str, str]:
    """The hash that `step` comes to from the checkpoint of version `begin`, and that of record."""
    found = world.checkpoints.latest_complete({begin})
    backend, algorithm = tiny_backend(world.config), build_algorithm(GrpoConfig())
    replay = StepReplay(
        config=world.config,
        queue=world.queue,
        limits=LedgerLimits(batch_groups=1, max_lag=world.queue.max_lag),
        backend=backend,
        algorithm=algorithm,
        read_episodes=world.read,
        read_rewards=None,
    )
    restore_step(backend, algorithm, found[1])
    steps = (await history_of(world)).steps(begin, step)
    for recorded in steps:
        await replay.take(recorded)
    return content_hash(file_hashes(backend.weights())), steps[-1].version.content_hash


async def three_versions(tmp_path, members: int = 2, **options):
    """A learner at version 2 with limit 1, and a group of version 0 that is still played."""
    world = world_of(tmp_path, max_lag=1, **options)
    learner = learner_of(world)
    await learner.start()
    (late,) = await world.admit(1, 0, size=members)
    for version in range(2):
        await world.play(1, version)
        await learner.step()
    return world, learner, late


async def test_masked_tokens_are_masked_again(tmp_path):
    """P15, case Q5: turn 1 has lag 2 and turn 3 lag 0."""
    world, learner, late = await three_versions(tmp_path, queue={"over_lag": "mask"})
    await world.finish(late, versions=[(0, 2), (1, 2)])
    assert (await learner.step()).masked_tokens == 3
    for begin in (0, 1, 2):
        found, of_record = await replayed(world, begin, 3)
        assert found == of_record


async def test_who_left_for_lag_shapes_the_baseline_again_or_not_at_all(tmp_path):
    """P15: under `mask` its reward counts, under `drop` it does not; both come out as they were."""
    for number, over_lag in enumerate(("mask", "drop")):
        world, learner, late = await three_versions(
            tmp_path / str(number), members=3, queue={"over_lag": over_lag}, limits={"max_lag": 4}
        )
        await world.finish(late, scores=(1.0, 0.0, 0.5), versions=[(0, 0), (2, 2), (1, 2)])
        await learner.step()
        found, of_record = await replayed(world, 2, 3)
        assert found == of_record, over_lag


async def test_steps_between_two_versions_are_told_apart_by_receipts(tmp_path):
    """P14: the second step starts one batch ahead of the version."""
    world = world_of(tmp_path, publish_every=2)
    learner = learner_of(world)
    await learner.start()
    await world.play(4, version=0)
    for _ in range(4):
        await learner.step()
    assert [receipt.step for receipt in world.receipts] == [1, 1, 2, 2, 3, 3, 4, 4]
    for begin, step in ((0, 1), (0, 2), (1, 3), (1, 4)):
        found, of_record = await replayed(world, begin, step)
        assert found == of_record
    steps = (await history_of(world)).steps(1, 4)
    assert [(one.step, one.start.parent, one.start.ahead) for one in steps] == [(3, 1, 0), (4, 1, 1)]


async def test_what_was_rolled_back_is_no_step_and_what_came_instead_is(tmp_path):
    """P6: the learner dies with version 2 unsettled; the next one goes back to version 0 and trains again."""
    world = world_of(tmp_path, checkpoint_every=9)
    first = learner_of(world)
    await first.start()
    await world.play(2, version=0)
    await first.step()
    await first.step()
    second = learner_of(world)
    assert await second.start(takeover=True) == 0
    await second.step()
    await second.step()
    history = await history_of(world)
    assert [history.step_of(version) for version in (1, 2, 3, 4)] == [None, None, 1, 2]
    found, of_record = await replayed(world, 0, 2)
    assert found == of_record


async def test_an_episode_that_is_not_what_was_trained_on_refuses_the_step(tmp_path):
    """P8, P9: by payload hash; nothing is left out in silence."""
    world = world_of(tmp_path)
    learner = learner_of(world)
    await learner.start()
    await world.play(1, version=0)
    await learner.step()
    world.stored[sorted(world.stored)[0]] = b"another"
    with pytest.raises(NotFound, match=r"step 1 cannot be recomputed: group 0 is refused .*its hash is another one"):
        await replayed(world, 0, 1)


async def test_a_recipe_that_judges_lag_otherwise_refuses_the_step(tmp_path):  # P15
    world, learner, late = await three_versions(tmp_path, members=3, queue={"over_lag": "mask"})
    await world.finish(late, scores=(1.0, 0.0, 0.5), versions=[(0, 0), (2, 2), (1, 2)])
    await learner.step()
    world.queue = world.queue.model_copy(update={"max_lag": 4})
    with pytest.raises(NotFound, match="0 members of group 0 are over the lag limit now, and 1 were then"):
        await replayed(world, 2, 3)
