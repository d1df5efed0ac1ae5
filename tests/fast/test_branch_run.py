"""A whole run whose groups branch: trained, replayed, inspected, and its environment steps counted."""

from collections import defaultdict

import pytest
from run_kit import run_inprocess, small_config, stored

from headrace.deploy.credit_curves import credit_curve
from headrace.deploy.inspection import episode_facts
from headrace.deploy.replaying import replay_all
from headrace.platform.records.status import Purpose
from headrace.platform.store.tables import ReceiptTable

TREE = "learner.algorithm={name: branch, group_size: 5, points: 2, continuations: 2}"


@pytest.fixture(scope="module")
def run(lookup_model, tmp_path_factory):
    changes = (TREE, "learner.steps=2", "learner.batch_groups=3", "environments.0.args.hops=[2]")
    return run_inprocess(small_config(lookup_model, tmp_path_factory.mktemp("runs"), *changes))


def trees(root):
    found = defaultdict(list)
    for episode in stored(root):
        if episode.purpose is Purpose.TRAIN:
            found[episode.attempt_id.group].append(episode)
    return found


def test_groups_are_trees_and_the_books_close(run):
    summary, root = run
    assert summary["learner_steps"] == 2
    assert summary["fates"]["trained"] > 0 and summary["fates"]["in_flight"] == 0
    continuations = 0
    for trunk, *others in trees(root).values():
        assert len(others) == 4 and not trunk.parent_episode
        for each in others:
            assert each.parent_episode in ("", trunk.episode_id)
            continuations += bool(each.parent_episode)
    assert continuations > 6


def test_a_continuation_is_trained_on_what_it_sampled_itself(run):
    _, root = run
    receipts = ReceiptTable(root.url).by_episode()
    seen = 0
    for episode in stored(root):
        if not episode.inherited_turns or episode.episode_id not in receipts:
            continue
        (receipt,) = receipts[episode.episode_id]
        own = [turn for turn in episode.turns[episode.inherited_turns :] if turn.is_action]
        assert receipt.loss_tokens == sum(int(turn.action_mask.sum()) for turn in own)
        assert receipt.advantages[: -len(own)] == (0.0,) * (len(receipt.advantages) - len(own))
        assert {span.reason for span in receipt.masked} == {"inherited"}
        facts = episode_facts(root, episode.episode_id)
        assert facts["episode_id"] == episode.episode_id
        seen += 1
    assert seen


async def test_continuations_replay_equal(run):
    _, root = run
    config = small_config("some-model", "some-runs", TREE, "environments.0.args.hops=[2]")
    branched = [episode for episode in stored(root) if episode.inherited_turns]
    tally = await replay_all(branched, config.environments, config.seed)
    assert (tally.episodes, tally.diverged, tally.not_compared) == (len(branched), 0, 0)


def test_steps_that_are_done_again_are_counted_apart(run):
    _, root = run
    before, after = credit_curve(root)
    assert (before.version, before.executed, before.again) == (0, 0, 0)
    train = [episode for group in trees(root).values() for episode in group]
    own = sum(sum(view.turn >= episode.inherited_turns for view in episode.views) for episode in train)
    assert after.executed == own
    assert after.again == sum(len(episode.views) for episode in train) - own > 0
    assert after.version == 2
