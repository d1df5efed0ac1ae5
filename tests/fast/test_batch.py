"""Episodes to samples and samples to microbatches."""

from collections.abc import Sequence

import numpy as np
import pytest

from headrace.platform.records import (
    AttemptId,
    LossMaskReason,
    MaskedSpan,
    Role,
    SamplingParams,
    Turn,
    VersionRef,
    VersionSpan,
    View,
    f32,
    i32,
)
from headrace.platform.testing.episodes import make_episode, plain_turn, policy_turn
from headrace.trainer.batch import pack, step_tokens
from headrace.trainer.credit import place_rewards
from headrace.trainer.samples import Sample, build_samples


def closed_turn(token_ids: Sequence[int], sampled: int, temperature: float = 1.0) -> Turn:
    """A policy turn of which the policy sampled the first `sampled` tokens; the platform appended the rest."""
    mask = np.array([1] * sampled + [0] * (len(token_ids) - sampled), np.uint8)
    return Turn(
        role=Role.ASSISTANT,
        token_ids=i32(token_ids),
        action_mask=mask,
        behaviour_logprobs=f32(mask * -0.25),
        version_spans=(VersionSpan(VersionRef("policy", 0), 0, sampled),),
        sampling=SamplingParams(temperature=temperature),
    )


def plain_sample(length: int, name: str = "e", loss: int = 2) -> Sample:
    mask = np.zeros(length, np.uint8)
    mask[length - loss :] = 1
    return Sample(
        episode_id=name,
        agent_id="",
        segment=0,
        lag=0,
        token_ids=i32(range(1, length + 1)),
        action_mask=mask,
        loss_mask=mask,
        behaviour_logprobs=f32(mask * -0.5),
        advantages=f32(mask),
        temperatures=f32([1.0] * length),
    )


def test_an_append_only_episode_is_the_concatenation_of_its_turns():
    turns = [
        plain_turn(Role.USER, token_ids=[1, 2]),
        closed_turn([3, 4, 9], sampled=2, temperature=0.7),
        plain_turn(Role.TOOL, token_ids=[5]),
        policy_turn(token_ids=[6, 7]),
    ]
    (sample,) = build_samples(make_episode(turns), [0.5, -2.0], lag=3)
    assert sample.token_ids.tolist() == [1, 2, 3, 4, 9, 5, 6, 7]
    assert sample.action_mask.tolist() == [0, 0, 1, 1, 0, 0, 1, 1]  # case T6: the appended token 9 has mask 0
    assert sample.loss_mask.tolist() == sample.action_mask.tolist()
    assert sample.behaviour_logprobs.tolist() == [0, 0, -0.25, -0.25, 0, 0, -0.5, -0.5]
    assert sample.temperatures[2:4].tolist() == f32([0.7, 0.7]).tolist()
    assert sample.lag == 3


def test_every_action_token_gets_its_turns_advantage():
    """case T15: turns of unequal length."""
    turns = [
        plain_turn(Role.USER, token_ids=[1]),
        policy_turn(token_ids=[2, 3, 4, 5]),
        plain_turn(Role.TOOL, token_ids=[6, 7]),
        policy_turn(token_ids=[8]),
    ]
    (sample,) = build_samples(make_episode(turns), [0.5, -2.0])
    assert sample.advantages.tolist() == [0, 0.5, 0.5, 0.5, 0.5, 0, 0, -2.0]


def test_one_advantage_per_policy_turn_is_required():
    with pytest.raises(ValueError, match="1 policy turns and was given 2 advantages"):
        build_samples(make_episode(), [1.0, 2.0])


def test_a_context_that_does_not_extend_the_last_is_another_sample():
    """case T17: the template strips earlier thinking, so turn 2 begins a segment with a freshly rendered context."""
    turns = [
        plain_turn(Role.USER, token_ids=[1, 2]),
        policy_turn(token_ids=[3, 4, 5]),
        plain_turn(Role.USER, token_ids=[1, 2, 5, 6], segment=1),
        policy_turn(token_ids=[7, 8], segment=1),
    ]
    views = (View(1, ((0, 1),)), View(3, ((2, 3),), segment=1))
    first, second = build_samples(make_episode(turns, views=views), [1.0, 2.0])
    assert first.token_ids.tolist() == [1, 2, 3, 4, 5]
    assert second.token_ids.tolist() == [1, 2, 5, 6, 7, 8]
    assert second.loss_mask.tolist() == [0, 0, 0, 0, 1, 1]
    assert (first.segment, second.segment) == (0, 1)


def test_a_dropped_turn_opens_a_context_and_nothing_is_trained_twice():
    """case T17: a view that leaves out the first exchange; the earlier action it still shows is context only."""
    turns = [
        plain_turn(Role.USER, token_ids=[1]),
        policy_turn(token_ids=[2]),
        plain_turn(Role.TOOL, token_ids=[3]),
        policy_turn(token_ids=[4]),
        plain_turn(Role.TOOL, token_ids=[5]),
        policy_turn(token_ids=[6]),
    ]
    views = (View(1, ((0, 1),)), View(3, ((0, 3),)), View(5, ((0, 1), (3, 5))))
    first, second = build_samples(make_episode(turns, views=views), [1.0, 2.0, 3.0])
    assert first.token_ids.tolist() == [1, 2, 3, 4, 5]
    assert first.loss_mask.tolist() == [0, 1, 0, 1, 0]
    assert second.token_ids.tolist() == [1, 4, 5, 6]
    assert second.loss_mask.tolist() == [0, 0, 0, 1]
    assert first.loss_tokens + second.loss_tokens == 3


def test_two_agents_are_two_samples():
    """case T18: turns A1 B1 A2 B2; each agent sees its own prompt and its own turns."""
    turns = []
    for token, agent in [(10, "A"), (20, "B"), (30, "A"), (40, "B")]:
        turns.append(plain_turn(Role.USER, token_ids=[token], agent_id=agent))
        turns.append(policy_turn(token_ids=[token + 1], agent_id=agent))
    views = (
        View(1, ((0, 1),)),
        View(3, ((2, 3),)),
        View(5, ((0, 2), (4, 5))),
        View(7, ((2, 4), (6, 7))),
    )
    for given in (views, ()):
        a, b = build_samples(make_episode(turns, views=given), [1.0, 2.0, 3.0, 4.0])
        assert (a.agent_id, a.token_ids.tolist(), a.advantages.tolist()) == ("A", [10, 11, 30, 31], [0, 1, 0, 3])
        assert (b.agent_id, b.token_ids.tolist(), b.advantages.tolist()) == ("B", [20, 21, 40, 41], [0, 2, 0, 4])


def test_masked_spans_leave_the_loss_but_not_the_action_mask():
    turns = [
        plain_turn(Role.USER, token_ids=[1]),
        policy_turn(token_ids=[2, 3, 4]),
        plain_turn(Role.TOOL, token_ids=[5]),
        policy_turn(token_ids=[6]),
    ]
    episode = make_episode(turns)
    (sample,) = build_samples(episode, [1.0, 1.0], masked=[MaskedSpan(1, 1, 3, LossMaskReason.LAG)])
    assert sample.action_mask.tolist() == [0, 1, 1, 1, 0, 1]
    assert sample.loss_mask.tolist() == [0, 1, 0, 0, 0, 1]
    assert episode.turns[1].action_mask.tolist() == [1, 1, 1]


def test_the_first_token_of_all_is_never_in_the_loss():
    (sample,) = build_samples(make_episode([policy_turn(token_ids=[1, 2])]), [1.0])
    assert sample.loss_mask.tolist() == [0, 1]
    assert step_tokens([sample]) == 1


def test_a_reward_on_a_masked_token_counts_on_the_turns_last_action():
    """case T12"""
    mask = np.array([0, 1, 1, 0, 0], np.uint8)
    placed = place_rewards(mask, f32([0.25, 0.5, 0.0, 0.0, 1.0]))
    assert placed.tolist() == [0, 0.5, 1.25, 0, 0]
    unmasked = place_rewards(mask, f32([0.0, 0.5, 1.25, 0.0, 0.0]))
    assert placed.tolist() == unmasked.tolist()
    with pytest.raises(ValueError, match="no action"):
        place_rewards(np.zeros(2, np.uint8), f32([1.0, 0.0]))


def test_a_nan_reward_on_an_action_stays_where_it_is():
    """case T9: the move is a choice, not a multiplication."""
    placed = place_rewards(np.array([1, 1, 0], np.uint8), f32([float("nan"), 0.0, 1.0]))
    assert np.isnan(placed[0])
    assert placed[1:].tolist() == [1.0, 0.0]


def test_microbatches_are_sorted_padded_and_bounded():
    samples = [plain_sample(n, f"e{n}") for n in (9, 3, 5, 4, 8)]
    batches = pack(samples, microbatch_tokens=16)
    assert [[row.length for row in micro.rows] for micro in batches] == [[3, 4, 5], [8], [9]]
    assert all(micro.token_ids.numel() <= 16 for micro in batches)
    first = batches[0]
    assert first.token_ids.shape == (3, 5)
    assert first.is_token.sum(1).tolist() == [3, 4, 5]
    assert sum(int(micro.loss_mask.sum()) for micro in batches) == step_tokens(samples) == 10
    assert not bool((first.loss_mask & ~first.is_token).any())


def test_packing_does_not_depend_on_the_order_of_arrival():
    """case V6"""
    samples = [plain_sample(4, f"e{n}") for n in range(6)]
    one = [[row.episode_id for row in micro.rows] for micro in pack(samples, 8)]
    other = [[row.episode_id for row in micro.rows] for micro in pack(samples[::-1], 8)]
    assert one == other == [["e0", "e1"], ["e2", "e3"], ["e4", "e5"]]


def test_a_sample_longer_than_a_microbatch_is_never_cut():
    batches = pack([plain_sample(50), plain_sample(4)], microbatch_tokens=16)
    assert [micro.token_ids.shape for micro in batches] == [(1, 4), (1, 50)]


def test_loss_tokens_know_their_rows():
    samples = [plain_sample(3, "a", loss=1), plain_sample(5, "b", loss=2)]
    (micro,) = pack(samples, 64)
    tokens = micro.loss_tokens(3)
    assert [tokens.rows[b].episode_id for b in tokens.row.tolist()] == ["a", "b", "b"]
    assert tokens.behaviour_logprobs.tolist() == [-0.5] * 3


def test_episode_ids_are_those_of_the_attempts():
    episode = make_episode(attempt_id=AttemptId("run", 7, 1, 2))
    assert build_samples(episode, [1.0])[0].episode_id == "run.t7.1.2"
