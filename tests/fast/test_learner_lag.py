"""Lag at train start, the three policies at its limit, and pacing (P14, P15, P16)."""

import asyncio

import pytest
from learner_kit import RUN, World

from headrace.platform.records.delivery import AtRisk
from headrace.platform.records.tables import LossMaskReason, MaskedSpan


async def test_lags_are_counted_in_learner_batches(tmp_path):
    """P14: episodes of version 0, trained at the second and third batch, have lags 1 and 2."""
    world = World(tmp_path)
    learner = world.learner()
    await learner.start()
    await world.play(6, version=0)
    assert [(await learner.step()).lags for _ in range(3)] == [{0: 4}, {1: 4}, {2: 4}]


async def test_what_is_over_the_limit_is_never_trained(tmp_path):
    """case Q11: a group that waited while the head moved on is dropped, and the learner takes the fresh ones."""
    world = World(tmp_path, max_lag=1)
    learner = world.learner()
    await learner.start()
    await world.play(4, version=0)
    await learner.step()
    await learner.step()
    stats = await world.ledger.stats()
    assert stats.fates["trained"] == 8
    await world.play(2, version=2)
    report = await learner.step()
    assert report.lags == {0: 4}


async def test_the_learner_judges_lag_for_itself(tmp_path):
    """P14, at train start: a ledger with a laxer limit does not make the learner train on older episodes."""
    world = World(tmp_path, max_lag=1, limits={"max_lag": 4})
    learner = world.learner()
    await learner.start()
    await world.play(6, version=0)
    await learner.step()
    await learner.step()
    await world.play(2, version=2)
    report = await learner.step()
    assert (report.dropped, report.lags) == ({"lag": 2}, {0: 4})
    stats = await world.ledger.stats()
    assert stats.fates == {"trained": 12, "in_flight": 0, "dropped:lag": 4}


async def test_publishing_every_second_step(tmp_path):
    """P14: unpublished batches count as lag; one commit consumes both steps' groups."""
    world = World(tmp_path, publish_every=2)
    learner = world.learner()
    await learner.start()
    await world.play(4, version=0)
    first, second = await learner.step(), await learner.step()
    assert (first.version, first.published, first.batches, first.lags) == (0, False, 1, {0: 4})
    assert (second.version, second.published, second.batches, second.lags) == (1, True, 2, {1: 4})
    stats = await world.ledger.stats()
    assert (stats.head_batches, stats.fates["trained"], stats.groups_leased) == (2, 8, 0)
    assert len(world.receipts) == 8


# --- over the limit at train start (P15) ------------------------------------------------------------------------------


async def three_versions(tmp_path, members: int = 2, **options):
    """A learner at version 2 with limit 1, and a group of version 0 that is still played."""
    world = World(tmp_path, max_lag=1, batch_groups=1, **options)
    learner = world.learner()
    await learner.start()
    (late,) = await world.admit(1, 0, size=members)
    for version in range(2):
        await world.play(1, version)
        await learner.step()
    world.receipts.clear()
    return world, learner, late


async def test_mask_takes_the_old_tokens_out_of_the_loss_and_nothing_else(tmp_path):
    """P15, case Q5: turn 1 has lag 2 and turn 3 lag 0; the advantages are those of the whole group."""
    world, learner, late = await three_versions(tmp_path, queue={"over_lag": "mask"})
    await world.finish(late, versions=[(0, 2), (1, 2)])
    report = await learner.step()
    assert (report.loss_tokens, report.masked_tokens, report.lags) == (2 + 5, 3, {0: 1, 1: 1})
    first, second = world.receipts
    assert first.masked == (MaskedSpan(1, 0, 3, LossMaskReason.LAG),)
    assert (first.lag, first.advantages) == (0, (0.5, 0.5))
    assert (second.masked, second.lag, second.advantages) == ((), 1, (-0.5, -0.5))
    assert (await world.ledger.stats()).holds


async def test_mask_keeps_the_reward_of_a_member_without_a_live_token(tmp_path):
    """P15: it shapes the baseline of the others, and is itself dropped, not trained."""
    world, learner, late = await three_versions(tmp_path, members=3, queue={"over_lag": "mask"})
    await world.finish(late, scores=(1.0, 0.0, 0.5), versions=[(0, 0), (2, 2), (1, 2)])
    report = await learner.step()
    assert (report.episodes, report.groups, report.masked_tokens, report.loss_tokens) == (2, 1, 5, 10)
    assert [receipt.advantages[0] for receipt in world.receipts] == [-0.5, 0.0]
    assert report.score_mean == 0.5
    stats = await world.ledger.stats()
    assert (stats.fates["trained"], stats.fates["dropped:lag"], stats.holds) == (4 + 2, 1, True)
    manifest = (await world.registry.manifests())[-1]
    assert manifest.consumed == {f"{RUN}.t0.0.0": "dropped:lag", f"{RUN}.t0.1.0": "trained", f"{RUN}.t0.2.0": "trained"}
    assert [(member.sample, member.fate, member.lag) for member in manifest.groups[0].members] == [
        (0, "dropped:lag", 0),
        (1, "trained", 0),
        (2, "trained", 1),
    ]


async def test_mask_drops_a_group_without_a_live_token(tmp_path):
    """P15, at train start: the ledger's limit is laxer here."""
    world, learner, late = await three_versions(tmp_path, queue={"over_lag": "mask"}, limits={"max_lag": 4})
    await world.finish(late, versions=[(0, 0), (0, 0)])
    await world.play(1, version=2)
    report = await learner.step()
    assert (report.dropped, report.lags, report.masked_tokens) == ({"lag": 1}, {0: 2}, 0)


async def test_tokens_of_a_version_from_before_the_resume_are_judged_too(tmp_path):
    """P14: the lineage comes from the manifests, so a new learner masks what the old one would have masked."""
    world, _, late = await three_versions(tmp_path, queue={"over_lag": "mask"}, checkpoint_every=1)
    heir = world.learner()
    assert await heir.start(takeover=True) == 2
    await world.finish(late, versions=[(0, 2), (1, 2)])
    report = await heir.step()
    assert (report.masked_tokens, report.lags) == (3, {0: 1, 1: 1})


@pytest.mark.parametrize("policy", ["drop", "wait"])
async def test_drop_lets_a_member_go_and_trains_the_rest(tmp_path, policy):
    """P15: two of three stay, so the advantages are over the two."""
    world, learner, late = await three_versions(tmp_path, members=3, queue={"over_lag": policy}, limits={"max_lag": 4})
    await world.finish(late, scores=(1.0, 0.5, 0.0), versions=[(0, 2), (2, 2), (1, 1)])
    report = await learner.step()
    assert (report.episodes, report.masked_tokens, report.lags, report.score_mean) == (2, 0, {0: 1, 1: 1}, 0.25)
    assert [receipt.advantages[0] for receipt in world.receipts] == [0.25, -0.25]
    stats = await world.ledger.stats()
    assert (stats.fates["dropped:lag"], stats.fates["trained"], stats.holds) == (1, 4 + 2, True)


@pytest.mark.parametrize(
    ("min_group", "scores", "reason"),
    [(3, (1.0, 0.5, 0.0), "lag"), (2, (1.0, 0.0, 0.0), "zero_variance")],
)
async def test_a_group_that_shrinks_too_far_is_dropped(tmp_path, min_group, scores, reason):
    """P15: below the least size, or without anything left to compare."""
    world, learner, late = await three_versions(
        tmp_path, members=3, queue={"min_group": min_group}, limits={"max_lag": 4}
    )
    await world.finish(late, scores=scores, versions=[(0, 0), (2, 2), (2, 2)])
    await world.play(1, version=2)
    report = await learner.step()
    assert (report.dropped, report.lags) == ({reason: 1}, {0: 2})


async def test_members_that_the_ledger_let_go_are_in_no_manifest(tmp_path):
    """P15: they left at the lease, so the commit neither names nor consumes them."""
    world, learner, late = await three_versions(tmp_path, members=3)
    await world.finish(late, scores=(1.0, 0.5, 0.0), versions=[(0, 2), (2, 2), (1, 1)])
    report = await learner.step()
    assert (report.episodes, report.dropped) == (2, {})
    (group,) = (await world.registry.manifests())[-1].groups
    assert ([member.sample for member in group.members], group.size, group.version) == ([1, 2], 3, 0)
    assert (await world.ledger.stats()).fates["dropped:lag"] == 1


async def test_limit_0_trains_on_nothing_older(tmp_path):
    """case Q12: one publish in mid-episode, and a ledger that would let it pass."""
    world = World(tmp_path, max_lag=0, batch_groups=1, limits={"max_lag": 4})
    learner = world.learner()
    await learner.start()
    (late,) = await world.admit(1, 0)
    await world.play(1, version=0)
    first = await learner.step()
    await world.finish(late, versions=[(0, 1), (1, 1)])
    await world.play(1, version=1)
    second = await learner.step()
    assert [first.lags, second.lags, second.dropped] == [{0: 2}, {0: 2}, {"lag": 1}]


# --- pacing (P15, P16) ------------------------------------------------------------------------------------------------


async def until(condition) -> None:
    while not condition():  # noqa: ASYNC110 - the learner polls on this loop too, and nothing here waits for time
        await asyncio.sleep(0)


async def one_at_risk(tmp_path, **queue):
    """A learner before step 2 with a batch at hand, and a group of version 0 in play that the step would lose."""
    world = World(tmp_path, max_lag=1, queue=queue)
    learner = world.learner()
    await learner.start()
    await world.play(2, version=0)
    (late,) = await world.admit(1, 0)
    await learner.step()
    await world.play(2, version=1)
    return world, learner, late


async def test_wait_holds_the_step_until_the_group_is_there(tmp_path):
    """P15: it is trained at the limit, and what was ready waits for the next step, which it can."""
    world, learner, late = await one_at_risk(tmp_path, over_lag="wait")
    step = asyncio.create_task(learner.step())
    await until(lambda: world.part.status().state == "holding step 2")
    assert world.part.status().waiting_for == "groups that it would push over the lag limit"
    assert world.part.status().detail["at_risk"] == 1
    world.clock.now_s += 5.0
    await world.finish(late)
    report = await step
    assert report.lags == {0: 2, 1: 2}
    assert 5.0 < report.held_s <= report.wait_s
    assert not report.length_bias


async def test_wait_gives_up_after_max_wait_s(tmp_path):
    """P15: then the step is taken, and the group is over the limit."""
    world, learner, late = await one_at_risk(tmp_path, over_lag="wait", max_wait_s=30.0)
    step = asyncio.create_task(learner.step())
    await until(lambda: world.part.status().state == "holding step 2")
    world.clock.now_s += 31.0
    report = await step
    assert (report.lags, report.version) == ({0: 4}, 2)
    assert report.held_s > 30.0
    await world.finish(late)
    await world.play(2, version=2)
    await learner.step()
    assert (await world.ledger.stats()).fates["dropped:lag"] == 2


async def test_drop_does_not_wait_for_whom_it_may_lose(tmp_path):
    _, learner, _ = await one_at_risk(tmp_path, over_lag="drop", lag_restarts=2)
    report = await learner.step()
    assert (report.lags, report.held_s, report.length_bias) == ({0: 4}, 0.0, False)


async def test_a_protected_group_is_waited_for_and_the_budget_ends(tmp_path):
    """P16: 10 % of the run's time; when they are spent the step says that it has a length bias."""
    world, learner, _ = await one_at_risk(tmp_path, lag_restarts=2, protect_share=0.1)

    async def at_risk(fence, parent, ahead, count):
        return AtRisk(playing=1, ready=0, protected=1)

    world.ledger.at_risk = at_risk
    world.clock.now_s += 990.0
    step = asyncio.create_task(learner.step())
    await until(lambda: world.part.status().state == "holding step 2")
    world.clock.now_s += 111.0
    report = await step
    assert report.length_bias
    assert report.held_s > 100.0


async def test_a_task_lost_to_lag_again_comes_back_protected_and_is_trained(tmp_path):
    """P16, with the ledger's own count: the step waits for the restarted group."""
    world = World(
        tmp_path,
        max_lag=1,
        batch_groups=1,
        queue={"lag_restarts": 1, "protect_share": 1.0},
        limits={"lag_restarts": 1},
    )
    learner = world.learner()
    await learner.start()
    (lost,) = await world.admit(1, 0)
    for version in range(2):
        await world.play(1, version)
        await learner.step()
    await world.finish(lost)
    await world.play(1, version=2)
    await learner.step()  # its lease finds the first one over the limit
    (again,) = await world.admit(1, 3)
    assert (again.position, again.group) == (lost.position, 4)
    await world.play(1, version=3)
    await learner.step()
    await world.play(1, version=4)
    step = asyncio.create_task(learner.step())
    await until(lambda: world.part.status().state == "holding step 5")
    await world.finish(again)
    report = await step
    assert (report.lags, report.length_bias) == ({1: 2}, False)
    assert (await world.ledger.stats()).protection_lost == 0


async def test_time_that_the_pacer_takes_is_not_time_without_a_batch(tmp_path):
    """The batch deadline is for producers that are gone; a held step has its batch."""
    world = World(tmp_path, max_lag=1, batch_deadline_s=10.0, queue={"over_lag": "wait", "max_wait_s": 30.0})
    learner = world.learner()
    await learner.start()
    await world.play(2, version=0)
    await world.admit(1, 0)
    await learner.step()
    await world.play(2, version=1)
    step = asyncio.create_task(learner.step())
    await until(lambda: world.part.status().state == "holding step 2")
    world.clock.now_s += 20.0
    for _ in range(10):
        await asyncio.sleep(0)
    assert not step.done()
    world.clock.now_s += 20.0
    assert (await step).version == 2
