"""PPO with a critic: credit from values to tokens by hand, and the loss against a plain NumPy version."""

import dataclasses

import msgspec
import numpy as np
import pytest
import torch
from learner_kit import World, tiny_backend

from headrace.platform.config import LearnerConfig, PpoConfig
from headrace.platform.contracts import ScoredEpisode
from headrace.platform.errors import ConfigError
from headrace.platform.records import AttemptId, Role, View, f32
from headrace.platform.records.status import ActionKind, RewardKind, Status, StopReason
from headrace.platform.records.tables import LossMaskReason, MaskedSpan, RewardRow
from headrace.platform.testing.episodes import make_episode, plain_turn, policy_turn
from headrace.platform.testing.fakes.learning import FakeBackend
from headrace.trainer.algorithms import build_algorithm
from headrace.trainer.batch import pack
from headrace.trainer.crediting import Valued, credited
from headrace.trainer.samples import Sample, build_samples
from headrace.trainer.value_loss import clipped_value_loss, step_values, value_loss

PLAIN = {"name": "ppo", "normalize": False}
CUT_OFF = {"terminated": False, "truncated": True, "stop_reason": StopReason.ENV_TRUNCATED}


def ppo(**options):
    return build_algorithm(PpoConfig(**{**PLAIN, **options}))


def valued(turns, values, score=0.0, rows=(), masked=(), sample=0, **fields) -> Valued:
    """An episode of `turns` and, for each of its samples, what the critic says after each token."""
    episode = make_episode(turns, attempt_id=AttemptId("test-run", 0, sample), **fields)
    samples = tuple(build_samples(episode, [0.0] * sum(turn.is_action for turn in turns), masked=masked))
    assert [len(each) for each in values] == [each.length for each in samples]
    return Valued(scored=ScoredEpisode(episode, score, tuple(rows)), samples=samples, values=tuple(map(f32, values)))


def two_turns(score=1.0, rows=(), masked=(), observation=1, **fields) -> Valued:
    """Tokens: user, a a, `observation` of a tool, a. Values: 0.5 before the first turn, 0.25 before the second, 2 at
    the end; 9 wherever nobody should look."""
    turns = [
        plain_turn(Role.USER, token_ids=[2]),
        policy_turn(token_ids=[3, 4], action_kind=ActionKind.TOOL),
        plain_turn(Role.TOOL, token_ids=[5] * observation),
        policy_turn(token_ids=[6], action_kind=ActionKind.SUBMIT),
    ]
    values = [0.5, 9.0, 9.0, *[9.0] * (observation - 1), 0.25, 2.0]
    return valued(turns, [values], score, rows, masked, **fields)


def row(kind: RewardKind, value: float, turn: int | None = None) -> RewardRow:
    return RewardRow(episode_id="e", kind=kind, value=value, turn=turn)


def test_turns_by_hand():
    """gamma 1, lam 1/2, score 1 on the last turn: deltas -0.25 and 0.75, advantages 0.125 and 0.75; each token of a
    turn has its turn's (case T15). Targets are 0.625 and 1, at the states in which turns begin."""
    (found,) = ppo(gae={"lam": 0.5}).credit([two_turns()])
    assert found.advantages == (0.125, 0.75)
    (sample,) = found.samples
    assert sample.advantages.tolist() == [0, 0.125, 0.125, 0, 0.75]
    assert sample.critic.mask.tolist() == [0, 1, 0, 0, 1]
    assert sample.critic.values[sample.critic.mask == 1].tolist() == [0.5, 0.25]
    assert sample.critic.targets[sample.critic.mask == 1].tolist() == [0.625, 1.0]


def test_many_observation_tokens_are_no_time():
    """case T14: 500 of them are one transition, as one is. case T13: they neither discount nor end anything."""
    one, many = (ppo(gae={"gamma": 0.5}).credit([two_turns(observation=n)])[0] for n in (1, 500))
    assert one.advantages == many.advantages
    assert many.samples[0].critic.mask.sum() == 2


def test_only_truncation_bootstraps():
    """The value after the last token, 2, stands for the rest of an episode that was cut off: last delta 1 + 2 - 0.25.
    P27: of one that a budget ended only where that is asked for, as its last state was graded."""
    by_budget = {**CUT_OFF, "stop_reason": StopReason.MAX_TURNS, "status": Status.BUDGET_EXHAUSTED}
    episodes = [two_turns(), two_turns(**CUT_OFF), two_turns(**by_budget)]
    ended, cut, spent = ppo(gae={"lam": 0.0}).credit(episodes)
    assert ended.advantages == spent.advantages == (-0.25, 0.75)
    assert cut.advantages == (-0.25, 2.75)
    found = ppo(gae={"lam": 0.0, "bootstrap": "always"}).credit(episodes)
    assert [each.advantages for each in found] == [ended.advantages, cut.advantages, cut.advantages]


def test_tokens_by_hand():
    """Each action token is a step: values before them 0.5, 9, 0.25; with lam 0 deltas 9 - 0.5, 0.25 - 9, 1 - 0.25. The
    receipt has the mean of a turn."""
    (found,) = ppo(gae={"over": "token", "lam": 0.0}).credit([two_turns()])
    assert found.samples[0].advantages.tolist() == [0, 8.5, -8.75, 0, 0.75]
    assert found.advantages == (-0.125, 0.75)
    assert found.samples[0].critic.mask.tolist() == [0, 1, 1, 0, 1]


def test_actions_by_hand():
    """A turn that the world never saw is part of the next: one step, from the value before the first turn."""
    episode = two_turns()
    unread = dataclasses.replace(
        episode, scored=msgspec.structs.replace(episode.scored, episode=_first_unread(episode.scored.episode))
    )
    (found,) = ppo(gae={"over": "action"}).credit([unread])
    assert found.advantages == (0.5, 0.5)
    assert found.samples[0].critic.mask.tolist() == [0, 1, 0, 0, 0]


def _first_unread(episode):
    turns = list(episode.turns)
    turns[1] = msgspec.structs.replace(turns[1], action_kind=ActionKind.NONE)
    return msgspec.structs.replace(episode, turns=tuple(turns))


def test_rewards_belong_to_turns():
    """Process 4 on the first turn, outcome 1 at the end less twice a cost of 0.5: with lam 1, 4 + 0 - 0.5 and -0.25."""
    rows = [row(RewardKind.PROCESS, 4.0, 1), row(RewardKind.OUTCOME, 1.0), row(RewardKind.COST, -0.5)]
    (found,) = ppo(gae={"lam": 1.0}, returns={"cost": 2.0}).credit([two_turns(rows=rows)])
    assert found.advantages == (3.5, -0.25)


def test_potentials_are_rewards_with_the_discount_of_gae():
    """gamma 1/2, values 0.5 and 0.25, lam 1, potentials 2 and 4: turns earn 1/2 * 2 - 0 and 1 - 2, since the end counts
    as 0: returns 1 - 1/2 and -1. Where the value of the last state is added, it keeps its 4: 1 + 2 - 2 + 1/2 * 2."""
    rows = [row(RewardKind.POTENTIAL, 2.0, 1), row(RewardKind.POTENTIAL, 4.0, 3), row(RewardKind.OUTCOME, 1.0)]
    algorithm = ppo(gae={"gamma": 0.5, "lam": 1.0}, returns={"shaping": True})
    ended, cut = algorithm.credit([two_turns(rows=rows), two_turns(rows=rows, **CUT_OFF)])
    assert ended.advantages == (0.5 - 0.5, -1.0 - 0.25)
    assert cut.advantages == (1.0 + 2.0 / 2 - 0.5, 2.0 - 0.25)
    (ignored,) = ppo(gae={"gamma": 0.5, "lam": 1.0}).credit([two_turns(rows=rows)])
    assert ignored.advantages == (0.5 - 0.5, 1.0 - 0.25)
    assert algorithm.advantages([two_turns(rows=rows).scored]) == [[0.5, -1.0]]


def test_each_context_gives_its_own_values():
    """case T17: the second turn was sampled in a new context, and its state's value is from there; time goes on."""
    turns = [
        plain_turn(Role.USER, token_ids=[2]),
        policy_turn(token_ids=[3]),
        plain_turn(Role.USER, token_ids=[2, 7], segment=1),
        policy_turn(token_ids=[4], segment=1),
    ]
    views = (View(1, ((0, 1),)), View(3, ((2, 3),), segment=1))
    one = valued(turns, [[0.5, 9.0], [9.0, 0.25, 9.0]], score=1.0, views=views)
    (found,) = ppo(gae={"lam": 0.0}).credit([one])
    assert found.advantages == (-0.25, 0.75)
    assert [sample.advantages.tolist() for sample in found.samples] == [[0, -0.25], [0, 0, 0.75]]


def test_agents_have_their_own_time():
    """case T18: A1 B1 A2 B2. The score counts for both, on the last turn of each."""
    turns = [
        policy_turn(token_ids=[3, 3], agent_id="a"),
        policy_turn(token_ids=[4, 4], agent_id="b"),
        policy_turn(token_ids=[3], agent_id="a"),
        policy_turn(token_ids=[4], agent_id="b"),
    ]
    values = [[9.0, 0.5, 9.0], [9.0, 0.125, 9.0]]
    views = tuple(View(k, ((k % 2, k % 2 + 1),) if k > 1 else ()) for k in range(4))
    (found,) = ppo(gae={"lam": 1.0}).credit([valued(turns, values, score=1.0, views=views)])
    assert found.advantages == (1.0, 1.0, 0.5, 0.875)  # nothing comes before the first token: its value is 0


def test_a_masked_token_is_time_but_teaches_nothing():
    """P15: the first turn is over the lag limit. Its value and reward count; neither policy nor critic learns there."""
    span = MaskedSpan(1, 0, 2, LossMaskReason.LAG)
    (found,) = ppo(gae={"lam": 0.5}).credit([two_turns(masked=(span,))])
    assert found.advantages == (0.125, 0.75)
    assert found.samples[0].critic.mask.tolist() == [0, 0, 0, 0, 1]


def test_normalized_over_the_steps_of_the_batch():
    """Advantages 0.125 and 0.75 of one episode, -0.375 and -0.25 of the other: mean 0.0625, variance 0.19140625."""
    found = build_algorithm(PpoConfig(gae={"lam": 0.5})).credit([two_turns(), two_turns(score=0.0)])
    plain = np.array([0.125, 0.75, -0.375, -0.25])
    expected = (plain - 0.0625) / np.sqrt(0.19140625)
    np.testing.assert_allclose([a for one in found for a in one.advantages], expected, atol=1e-6)
    targets = found[0].samples[0].critic.targets
    assert targets[[1, 4]].tolist() == [0.625, 1.0]  # the critic learns what was earned, not how it compares


def test_rounding_is_not_blown_up():
    """Advantages that differ by less than float32 can tell are not divided by their deviation."""
    found = build_algorithm(PpoConfig(gae={"lam": 0.5})).credit([two_turns(), two_turns(score=1.0 + 1e-7)])
    first, second = (one.advantages for one in found)
    assert np.abs(np.array(first) - np.array(second)).max() < 1e-6


def test_one_step_alone_is_no_comparison():
    turns = [plain_turn(Role.USER, token_ids=[2]), policy_turn(token_ids=[3])]
    (found,) = build_algorithm(PpoConfig()).credit([valued(turns, [[0.5, 0.0]], score=1.0)])
    assert found.advantages == (0.5,)
    assert build_algorithm(PpoConfig()).credit([]) == []


def test_before_values_are_known_they_count_as_nothing():
    """At the opening of a group: gamma 1, lam 1/2, so the score is worth 1/2 on the turn before the last."""
    assert ppo(gae={"lam": 0.5}).advantages([two_turns().scored]) == [[0.5, 1.0]]


def test_the_value_loss_by_hand():
    """Old 0, clip 0.5, target 1. At 0.25: 0.75^2 / 2. At 0.8 it moved too far: 0.5^2 / 2, without gradient. At -0.8,
    away from the target: 1.8^2 / 2, and the gradient pulls it back."""
    values = torch.tensor([0.25, 0.8, -0.8], requires_grad=True)
    loss = clipped_value_loss(values, torch.zeros(3), torch.ones(3), 0.5)
    assert loss.tolist() == pytest.approx([0.28125, 0.125, 1.62])
    loss.sum().backward()
    assert values.grad.tolist() == pytest.approx([-0.75, 0.0, -1.8])


def test_samples_without_credit_teach_no_critic():
    (plain,) = two_turns().samples
    (micro,) = pack([plain], 64)
    with pytest.raises(ValueError, match=r"t0\.0.* was not credited by value"):
        value_loss(torch.zeros(3), micro.loss_tokens(3), 2, 0.2)


# --- against a plain NumPy version ------------------------------------------------------------------------------------


def numpy_batch(rng) -> tuple[list[Valued], list[dict]]:
    """Ragged episodes, some cut off, and the same as plain lists of turns: rewards, values, token places."""
    batch, plain = [], []
    for number in range(6):
        turns, rows, places, at = [], [], [], 0
        for t in range(int(rng.integers(1, 4))):
            seen, said = int(rng.integers(1, 5)), int(rng.integers(1, 4))
            turns += [plain_turn(Role.USER, token_ids=[2] * seen), policy_turn(token_ids=[3] * said)]
            places.append(range(at + seen, at + seen + said))
            rows.append(row(RewardKind.PROCESS, float(rng.normal()), 2 * t + 1))
            at += seen + said
        values = rng.normal(size=at)
        cut = bool(rng.integers(2))
        batch.append(valued(turns, [values], rows=rows, sample=number, **(CUT_OFF if cut else {})))
        rewards = [float(each.value) for each in rows]
        plain.append({"rewards": rewards, "values": f32(values), "places": places, "cut": cut})
    return batch, plain


def numpy_advantages(episode, gamma, lam, by_token):
    """The definition, term by term, over turns or over action tokens."""
    v = episode["values"].astype(np.float64)
    steps, rewards = [[p[0]] for p in episode["places"]], list(episode["rewards"])
    if by_token:
        steps = [[t] for p in episode["places"] for t in p]
        ends = [p[-1] for p in episode["places"]]
        rewards = [rewards[ends.index(t[0])] if t[0] in ends else 0.0 for t in steps]
    state = [v[step[0] - 1] for step in steps] + [v[-1] if episode["cut"] else 0.0]
    deltas = [r + gamma * state[k + 1] - state[k] for k, r in enumerate(rewards)]
    total = [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, len(deltas))) for t in range(len(deltas))]
    return total, state[:-1], [step[0] for step in steps]


@pytest.mark.parametrize("over", ["turn", "token"])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5), (0.99, 0.0)])
def test_credit_equals_numpy(over, gamma, lam):
    rng = np.random.default_rng(3)
    batch, plain = numpy_batch(rng)
    found = ppo(gae={"over": over, "gamma": gamma, "lam": lam}, normalize=True).credit(batch)
    known = [numpy_advantages(each, gamma, lam, over == "token") for each in plain]
    everything = np.concatenate([each[0] for each in known])
    for one, (advantages, values, firsts) in zip(found, known, strict=True):
        (sample,) = one.samples
        scaled = (np.array(advantages) - everything.mean()) / (everything.std() + 1e-8)
        np.testing.assert_allclose(sample.advantages[firsts], scaled, atol=1e-6)
        np.testing.assert_allclose(sample.critic.targets[firsts], np.add(advantages, values), atol=1e-6)
        assert np.flatnonzero(sample.critic.mask).tolist() == firsts


def test_loss_equals_numpy():
    """Clipped policy loss over tokens and clipped value loss over turns, from logprobs and values that are given."""
    rng = np.random.default_rng(5)
    batch, _ = numpy_batch(rng)
    algorithm = ppo()
    samples = [sample for one in algorithm.credit(batch) for sample in one.samples]
    (micro,) = pack(samples, 10_000)
    tokens = micro.loss_tokens(int(micro.loss_mask.sum()))
    logprobs = rng.normal(-1.0, 0.3, len(tokens.row))
    behaviour, advantages = (x.double().numpy() for x in (tokens.behaviour_logprobs, tokens.advantages))
    ratio = np.exp(logprobs - behaviour)
    surrogate = np.minimum(ratio * advantages, np.clip(ratio, 0.8, 1.28) * advantages)
    loss = algorithm.loss(torch.tensor(logprobs), tokens).loss
    assert float(loss) == pytest.approx(-surrogate.mean(), abs=1e-6)

    columns = [(s.critic.values, s.critic.targets, s.critic.mask) for s in micro.rows]
    chosen = [(b, c) for b, c in zip(tokens.row.tolist(), tokens.column.tolist(), strict=True)]
    old, target, begins = (np.array([columns[b][i][c] for b, c in chosen], np.float64) for i in range(3))
    values = old + rng.normal(0, 0.3, len(old))
    near = old + np.clip(values - old, -0.2, 0.2)
    terms = 0.5 * np.maximum((values - target) ** 2, (near - target) ** 2)
    found = value_loss(torch.tensor(values), tokens, step_values(samples), 0.2)
    assert float(found) == pytest.approx(terms[begins == 1].mean(), abs=1e-6)


# --- through the learner ----------------------------------------------------------------------------------------------


async def test_the_learner_trains_and_writes_the_real_advantages(tmp_path):
    """Values are 0 at first, so the receipts have the normalized scores: 1 and 0 on both turns, with lam 1."""
    options = PpoConfig(gae={"lam": 1.0})
    world = World(tmp_path, algorithm=options)
    learner = world.learner(tiny_backend(world.config), build_algorithm(options))
    await learner.start()
    await world.play(2, version=0)
    report = await learner.step()
    assert (report.version, report.loss_tokens) == (1, 20)
    assert [receipt.advantages for receipt in world.receipts] == [pytest.approx(a) for a in ((1, 1), (-1, -1)) * 2]


async def test_a_backend_without_critic_is_named(tmp_path):
    world = World(tmp_path)
    learner = world.learner(FakeBackend(), ppo())
    await learner.start()
    await world.play(2, version=0)
    with pytest.raises(ConfigError, match="needs a critic, which this learner's backend does not hold"):
        await learner.step()


def test_others_are_credited_at_the_opening_alone():
    assert credited(FakeBackend(), build_algorithm(LearnerConfig().algorithm), []) == []


def test_own_turns_of_a_sample():
    (sample,) = two_turns(observation=2).samples
    assert isinstance(sample, Sample)
    assert [(own.turn, own.start, own.end) for own in sample.turns] == [(1, 1, 3), (3, 5, 6)]
