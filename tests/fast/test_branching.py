"""A group whose members branch off its first one: who waits for whom, what each begins with, and what goes wrong."""

import asyncio
import itertools

import msgspec
import pytest
from episode_kit import DONE, World, char_call, ends, goes_on, says
from worker_kit import Bench, no_task_left

from headrace.actors.branching import WITHOUT, Branches, Branching
from headrace.actors.plan import PlayedEpisode
from headrace.actors.replay import replay_episode
from headrace.platform.errors import EnvironmentFault
from headrace.platform.fidelity import check_episode
from headrace.platform.records import AttemptId, Budgets, Role, StopReason
from headrace.platform.testing.episodes import make_episode, plain_turn, policy_turn

TREE = Branching(points=2, continuations=2)
SIZE = 5
WORDS = (char_call(1), char_call(2), char_call(3), DONE)


def chain(n, step=None, turns=4):
    """The n-th world: it ends after so many turns, and every answer before says which one it is."""
    reads = itertools.count(1)

    async def act(message):
        if step is not None:
            await step(n, message)
        read = next(reads)
        return goes_on(f"read {read}") if read < turns else ends(1.0)

    return World(act)


def episode_of(turns, **fields):
    pairs = [(plain_turn(Role.USER), policy_turn()) for _ in range(turns)]
    values = {"budgets": Budgets(max_turns=8), **fields}
    return make_episode([turn for pair in pairs for turn in pair], **values)


@pytest.fixture
async def bench(tmp_path, monkeypatch):
    made = []

    def make(world=chain, **options):
        settings = {"engine": says(*WORDS), "group_size": SIZE, "branching": TREE, "max_episodes": 2 * SIZE, **options}
        made.append(Bench(tmp_path, monkeypatch, world, **settings))
        return made[-1]

    yield make
    for each in made:
        await each.worker._judge.close()


@pytest.fixture(autouse=True)
async def nothing_is_left_running():
    before = asyncio.all_tasks()
    yield
    await asyncio.sleep(0)
    assert not no_task_left(before)


def played(b, group=0):
    """The episodes of a group, by sample and attempt."""
    return sorted((each for each in b.store.iterate() if each.attempt_id.group == group), key=lambda e: e.attempt_id)


def begins(episodes):
    return [(each.parent_episode, each.branch_step) for each in episodes]


NOWHERE = ("", None)


@pytest.mark.parametrize(
    ("tree", "turns", "steps"),
    [
        (TREE, 4, [0, 0, 2, 2]),
        (TREE, 5, [0, 0, 2, 2]),
        (TREE, 1, [0, 0, 0, 0]),
        (Branching(3, 2), 6, [0, 0, 2, 2, 4, 4]),
        (Branching(3, 1), 2, [0, 1, 0]),
        (Branching(4, 1), 3, [0, 1, 2, 0]),
        (WITHOUT, 3, [0, 0, 0]),
    ],
)
def test_points_are_spread_evenly_over_the_trunk(tree, turns, steps):
    trunk = episode_of(turns)
    found = (
        [tree.first_step(sample, trunk) for sample in range(1, 1 + len(steps))] if tree.points > 1 else [0] * len(steps)
    )
    assert found == steps
    assert all(not tree.waits(sample) for sample in range(1, 1 + tree.continuations))


def test_the_last_step_is_one_that_the_trunk_can_go_on_from():
    """A budget of turns leaves no room after the last one."""
    trunk = episode_of(3, budgets=Budgets(max_turns=3), stop_reason=StopReason.MAX_TURNS)
    assert max(Branching(3, 1).first_step(sample, trunk) for sample in (1, 2, 3)) == 2


async def test_a_round_plays_the_trunk_first_and_the_rest_from_its_steps(bench):
    b = bench()
    await b.publish()
    assert await b.worker.play_round(1) == 1
    stats = await b.ledger.stats()
    assert (stats.groups_ready, stats.dispatched, stats.score_count) == (1, SIZE, SIZE)
    trunk, *others = played(b)
    assert begins([trunk, *others]) == [NOWHERE] * 3 + [(trunk.episode_id, 2)] * 2
    for each in others[2:]:
        check_episode(each)
        assert each.inherited_turns == 5
        for mine, its in zip(each.turns[:5], trunk.turns[:5], strict=True):
            assert mine.token_ids.tolist() == its.token_ids.tolist()
            assert mine.action_mask.tolist() == its.action_mask.tolist(), "the mask is never changed"
            assert (mine.seed, mine.version_spans) == (its.seed, its.version_spans)
        assert each.turns[5].seed != trunk.turns[5].seed, "it samples anew"
        assert each.version == trunk.version, "P18"
        assert each.cost == trunk.cost, "what a grader sees is the whole episode"
        assert (await replay_episode(each, chain(0))).equal
    keys = [key for world in b.worlds for key in world.keys]
    assert len(keys) == len(set(keys)), "P26"
    counts = b.worker.stats().environments["kit"]
    assert (counts.episodes, counts.turns) == (SIZE, 3 * 4 + 2 * 2), "turns that were inherited are not counted again"
    assert (
        counts.sampled_tokens == sum(each.action_tokens for each in played(b)) - 2 * trunk.turns[1].action_mask.size * 2
    )


async def test_what_waits_begins_when_the_trunk_has_ended(bench):
    gate = asyncio.Event()

    async def step(n, message):
        if n == 0:
            await gate.wait()

    b = bench(lambda n: chain(n, step=step), max_episodes=SIZE)
    await b.publish()
    await b.worker.start()
    await b.comes(lambda: sum(b.worker.stats().statuses.values()) == 2)
    await b.comes(lambda: b.worker.stats().running == 3)  # the trunk, and two that wait for it
    assert len(b.used) == 3, "who waits holds no world (P21)"
    gate.set()
    await b.until(lambda stats: stats.groups_ready >= 1)
    await b.worker.stop()
    await b.check_closed()
    trunk = played(b)[0]
    assert begins(played(b)[3:]) == [(trunk.episode_id, 2)] * 2


async def test_who_waits_is_cancelled_as_any_other(bench):
    async def step(n, message):
        await asyncio.Event().wait()

    b = bench(lambda n: chain(n, step=step))
    await b.publish()
    await b.worker.start()
    await b.comes(lambda: b.worker.stats().running == 2 * SIZE)
    await b.worker.stop()
    stats = await b.check_closed()
    assert stats.fates["cancelled:stopped"] == 2 * SIZE


def failing(which, **options):
    """Worlds of which one fails; they are numbered in the order of play, so that the first is the trunk's."""

    async def step(n, message):
        if n == which:
            raise EnvironmentFault("lost its sandbox", **options)

    return lambda n: chain(n, step=step)


# P2, E2: a lost trunk is played again, and only then branched off
@pytest.mark.parametrize("loops", [False, True])
async def test_a_trunk_that_is_lost_is_replaced_before_anyone_branches_off(bench, loops):
    b = bench(failing(0), max_episodes=SIZE)
    await b.publish()
    if loops:
        await b.worker.start()
        await b.until(lambda stats: stats.groups_ready == 1)
        await b.worker.stop()
        await b.check_closed()
    else:
        await b.worker.play_round(1)
    first, again, *others = played(b)
    assert (first.attempt_id.attempt, again.attempt_id.attempt) == (0, 1)
    assert first.fault and not again.fault
    assert begins(others) == [NOWHERE] * 2 + [(again.episode_id, 2)] * 2


# P18: the group shrinks to what is there
@pytest.mark.parametrize("loops", [False, True])
async def test_without_a_trunk_everybody_plays_from_the_beginning(bench, loops):
    b = bench(failing(0, transient=False), max_episodes=SIZE)
    await b.publish()
    if loops:
        await b.worker.start()
        await b.until(lambda stats: stats.groups_ready == 1)
        await b.worker.stop()
        await b.check_closed()
    else:
        await b.worker.play_round(1)
        stats = await b.ledger.stats()
        assert (stats.groups_ready, stats.score_count, stats.fates["failed:environment"]) == (1, SIZE - 1, 1)
    trunk, *others = played(b)
    assert trunk.fault
    assert begins(others) == [NOWHERE] * 4
    assert all(len(each.views) == 4 for each in others)


async def test_a_world_that_goes_otherwise_is_a_fault_and_no_reward(bench):
    """It cannot be branched off: the group shrinks, and the fault names the step."""
    b = bench(lambda n: chain(n) if n < 3 else World(lambda message: goes_on("something else")))
    await b.publish()
    await b.worker.play_round(1)
    stats = await b.ledger.stats()
    assert (stats.groups_ready, stats.score_count, stats.fates["failed:environment"]) == (1, 3, 2)
    trunk, *_, lost = played(b)
    assert (lost.turns, lost.inherited_turns, lost.parent_episode) == ((), 0, trunk.episode_id)
    assert f"cannot branch off {trunk.episode_id}: the world diverges at step 1" in lost.fault
    assert not any(row.episode_id == lost.episode_id for row in b.rewards.rows())


async def test_a_continuation_that_is_lost_on_the_way_is_played_again(bench):
    b = bench(failing(3))
    await b.publish()
    await b.worker.play_round(1)
    stats = await b.ledger.stats()
    trunk = played(b)[0]
    assert (stats.score_count, stats.fates["failed:environment"]) == (SIZE, 1)
    lost = next(each for each in played(b) if each.fault)
    assert "may not another time" in lost.fault
    (again,) = [each for each in played(b) if each.attempt_id == lost.attempt_id.next_attempt()]
    assert (again.parent_episode, again.branch_step) == (trunk.episode_id, 2)


# P18
@pytest.mark.parametrize(("done", "branch"), [(0, True), (1, False), (3, False)])
async def test_the_rest_of_a_dead_workers_group_is_played_to_its_end(bench, done, branch):
    """The trunk is played again where it was lost too; where it had been put, the rest plays from the beginning."""
    b = bench()
    await b.publish()
    old = b.another()
    (ticket,) = (await b.ledger.admit(0, SIZE, 1, old.holder)).tickets
    for attempt_id in old._open(ticket, 0.0)[:done]:
        await old._deliver([await old._play_present(attempt_id)])
    await b.ledger.disown(old.holder)
    assert await b.worker.play_round(1) == 1
    stats = await b.ledger.stats()
    assert (stats.groups_ready, stats.score_count, stats.holds) == (1, SIZE, True)
    trunk, *others = played(b)
    assert begins(others[2:]) == ([(trunk.episode_id, 2)] if branch else [NOWHERE]) * 2


async def test_whether_there_is_a_trunk_is_settled_once():
    branches = Branches(TREE)
    assert branches.must_wait(3) and not branches.must_wait(2)
    waiting = asyncio.create_task(branches.prefix_of(3))
    branches.ended(PlayedEpisode(episode=episode_of(4), rewards=(), score=None))
    branches.over(4)
    assert branches.must_wait(3), "a trunk without a score may be played again; others are none"
    first = episode_of(4)
    branches.ended(PlayedEpisode(episode=first, rewards=(), score=0.0))
    branches.ended(PlayedEpisode(episode=episode_of(2), rewards=(), score=1.0))
    branches.over(0)
    prefix = await waiting
    assert (prefix.parent, prefix.step) == (first, 2)
    assert await branches.prefix_of(1) is None


async def test_a_short_trunk_has_fresh_episodes_for_the_points_that_it_lacks(bench):
    b = bench(lambda n: chain(n, turns=1))
    await b.publish()
    await b.worker.play_round(1)
    assert begins(played(b)) == [NOWHERE] * SIZE


async def test_members_differ_in_what_they_sample_and_in_nothing_else(bench):
    b = bench()
    await b.publish()
    await b.worker.play_round(1)
    episodes = played(b)
    assert len({(each.task.task_id, each.seed) for each in episodes}) == 1
    assert len({each.turns[-1].seed for each in episodes if each.turns[-1].role is Role.ASSISTANT}) == SIZE
    ids = [msgspec.structs.replace(each.attempt_id, run="") for each in episodes]
    assert ids == [AttemptId("", 0, sample) for sample in range(SIZE)]
