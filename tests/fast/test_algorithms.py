"""Conformance of all algorithms; the advantages of RLOO, REINFORCE and GiGPO on numbers worked by hand."""

import math

import msgspec
import pytest
from learner_kit import World, tiny_backend

from headrace.platform.config import (
    BranchConfig,
    GigpoConfig,
    GrpoConfig,
    PpoConfig,
    ReinforceConfig,
    RlooConfig,
    TinyLlamaConfig,
)
from headrace.platform.contracts import ScoredEpisode
from headrace.platform.records import AttemptId, Role
from headrace.platform.records.message import HashPair
from headrace.platform.records.status import RewardKind
from headrace.platform.records.tables import RewardRow
from headrace.platform.testing.conformance.algorithm import ALGORITHM_SUITE, scored
from headrace.platform.testing.episodes import make_episode, plain_turn, policy_turn
from headrace.platform.testing.fakes.learning import FakeAlgorithm
from headrace.trainer.algorithms import ALGORITHMS, build_algorithm
from headrace.trainer.algorithms.gigpo import step_groups
from headrace.trainer.backends.torch import TorchBackend
from headrace.trainer.model import build_tiny_llama

TINY = TinyLlamaConfig(hidden=16, layers=1, heads=2, intermediate=16, max_positions=64)

CONFIGS = {
    "grpo": GrpoConfig(),
    "dr_grpo": GrpoConfig(scale="none", aggregation="fixed"),
    "rloo": RlooConfig(),
    "rloo_to_go": RlooConfig(returns={"credit": "to_go", "gamma": 0.5}),
    "reinforce_group": ReinforceConfig(),
    "reinforce_running": ReinforceConfig(baseline="running", group_size=1),
    "reinforce_none": ReinforceConfig(baseline="none"),
    "gigpo": GigpoConfig(),
    "branch": BranchConfig(),
    "ppo": PpoConfig(),
    "ppo_token": PpoConfig(group_size=1, gae={"over": "token"}),
}
FACTORIES = {"fake": FakeAlgorithm, **{n: lambda c=c: build_algorithm(c) for n, c in CONFIGS.items()}}


def process(episode_id: str, turn: int | None, value: float) -> RewardRow:
    return RewardRow(episode_id=episode_id, kind=RewardKind.PROCESS, turn=turn, value=value)


def walk(sample: int, score: float, states: list[str]) -> ScoredEpisode:
    """An episode with one policy turn from each of `states`."""
    turns = []
    for state in states:
        turns += [plain_turn(Role.USER, state_hash=HashPair("raw of " + state, state)), policy_turn()]
    return ScoredEpisode(make_episode(turns, attempt_id=AttemptId("test-run", 0, sample)), score)


@pytest.mark.parametrize("check", ALGORITHM_SUITE.values(), ids=ALGORITHM_SUITE)
@pytest.mark.parametrize("factory", FACTORIES.values(), ids=FACTORIES)
async def test_conformance(factory, check):
    await check(factory)


def test_every_name_of_the_configuration_is_built():
    assert {config.name for config in CONFIGS.values()} == set(ALGORITHMS)
    for config in CONFIGS.values():
        algorithm = build_algorithm(config)
        assert (algorithm.name, algorithm.needs_variance) == (config.name, config.needs_variance)


@pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce_group", "reinforce_none", "gigpo"])
async def test_each_takes_a_step_of_the_learner(tmp_path, name):
    """From the queue to a receipt: members with scores 1 and 0 are told apart, the better one above the other."""
    world = World(tmp_path)
    model = build_tiny_llama(TINY, 20, 0, pad_token_id=0, eos_token_id=1)
    learner = world.learner(TorchBackend(model, world.config), build_algorithm(CONFIGS[name]))
    await learner.start()
    await world.play(2, version=0)
    report = await learner.step()
    assert (report.version, report.loss_tokens) == (1, 20)
    advantages = [receipt.advantages for receipt in world.receipts]
    assert [len(one) for one in advantages] == [2, 2, 2, 2]
    assert all(better > worse for better, worse in zip(advantages[0], advantages[1], strict=True))


def test_rloo_by_hand():
    """Scores 1 0 0.5: others' means 0.25, 0.75, 0.5."""
    values = build_algorithm(RlooConfig()).advantages([scored(0, 1.0, 2), scored(1, 0.0), scored(2, 0.5)])
    assert values == [[0.75, 0.75], [-0.75], [0.0]]


def test_rloo_turn_by_turn_by_hand():
    """Process rewards 1 then 2 against a single 1, gamma 1/2, no outcome.

    Returns to go: 1 + 2/2 = 2, 2; and 1. The second ended after one turn, so its 1 is the baseline of both turns; the
    first's first turn, 2, is the baseline of the second's only one.
    """
    group = [scored(0, 3.0, turns=2), scored(1, 1.0)]
    rows = [(process("a", 1, 1.0), process("a", 3, 2.0)), (process("b", 1, 1.0),)]
    group = [msgspec.structs.replace(one, rewards=r) for one, r in zip(group, rows, strict=True)]
    algorithm = build_algorithm(RlooConfig(returns={"credit": "to_go", "gamma": 0.5}))
    assert algorithm.advantages(group) == [[1.0, 1.0], [-1.0]]


async def test_the_running_mean_learns_from_each_batch_and_is_in_the_checkpoint(tmp_path):
    """Scores 1 and 0: at first a baseline of 0, then of 1/2; whoever resumes goes on with it."""
    world = World(tmp_path, checkpoint_every=1, limits={"drop_zero_variance": False})
    config = ReinforceConfig(baseline="running")
    learner = world.learner(tiny_backend(world.config), build_algorithm(config))
    await learner.start()
    await world.play(2, version=0)
    await learner.step()
    await learner.close()
    again = world.learner(tiny_backend(world.config), build_algorithm(config))
    await again.start(takeover=True)
    await world.play(2, version=1)
    await again.step()
    assert [receipt.advantages[0] for receipt in world.receipts] == [1.0, 0.0, 1.0, 0.0, 0.5, -0.5, 0.5, -0.5]


async def test_reward_rows_reach_the_algorithm_that_asks_for_them(tmp_path):
    """A cost of 1/4 for the better member, counted four times: nothing is left of its advantage."""
    asked = []

    async def read_rewards(episode_ids):
        asked.extend(episode_ids)
        rows = {name: [RewardRow(episode_id=name, kind=RewardKind.OUTCOME, value=0.0)] for name in episode_ids}
        better = next(name for name in episode_ids if name.endswith(".0.0"))
        costly = RewardRow(episode_id=better, kind=RewardKind.COST, value=-0.25)
        return {**rows, better: [RewardRow(episode_id=better, kind=RewardKind.OUTCOME, value=1.0), costly]}

    world = World(tmp_path, batch_groups=1)
    algorithm = build_algorithm(RlooConfig(returns={"cost": 4.0}))
    learner = world.learner(tiny_backend(world.config), algorithm, read_rewards=read_rewards)
    await learner.start()
    await world.play(1, version=0)
    await learner.step()
    assert [receipt.advantages for receipt in world.receipts] == [(0.0, 0.0), (0.0, 0.0)]
    assert sorted(asked) == ["test-run.t0.0.0", "test-run.t0.1.0"]


def test_terms_without_rows_are_refused():
    group = [msgspec.structs.replace(scored(i, float(i)), rewards=()) for i in range(2)]
    with pytest.raises(ValueError, match="need its reward rows"):
        build_algorithm(RlooConfig(returns={"cost": 2.0})).advantages(group)


def test_the_groups_mean_by_hand():
    """Scores 1 0 0.5 less their mean 0.5: (n - 1) / n of what leaving one out gives."""
    values = build_algorithm(ReinforceConfig()).advantages([scored(0, 1.0), scored(1, 0.0), scored(2, 0.5)])
    assert values == [[0.5], [-0.5], [0.0]]


def test_the_running_mean_by_hand():
    """Batches of mean 1 and 0 with decay 0.75: first 0, then 1, then 0.75."""
    algorithm = build_algorithm(ReinforceConfig(baseline="running", decay=0.75, group_size=1))
    found = []
    for batch in ([[scored(0, 1.5)], [scored(1, 0.5)]], [[scored(0, 0.0)]]):
        found.append(algorithm.advantages([scored(0, 1.0)]))
        algorithm.observe(batch)
    assert [*found, algorithm.advantages([scored(0, 1.0)])] == [[[1.0]], [[0.0]], [[0.25]]]


def test_the_running_mean_survives_a_resume():
    config = ReinforceConfig(baseline="running", group_size=1)
    one, other = build_algorithm(config), build_algorithm(config)
    one.observe([[scored(0, 4.0)]])
    other.restore(one.state())
    for algorithm in (one, other):
        algorithm.observe([[scored(0, 2.0)]])
    assert other.state() == one.state() == {"mean": pytest.approx(0.9 * 4 + 0.1 * 2), "batches": 2.0}
    one.observe([])
    assert other.state() == one.state()


def test_no_baseline_is_the_return_itself():
    algorithm = build_algorithm(ReinforceConfig(baseline="none", group_size=1))
    assert algorithm.advantages([scored(0, 0.25, turns=2)]) == [[0.25, 0.25]]
    assert not algorithm.needs_variance


def test_step_groups_are_turns_that_began_in_the_same_state():
    """Also within one episode; states seen once, or without a hash, form none."""
    first, second = walk(0, 1.0, ["a", "b", "a"]), walk(1, 0.0, ["a", "c", ""])
    assert step_groups([first.episode, second.episode]) == [[(0, 0), (0, 2), (1, 0)]]


def test_gigpo_by_hand():
    """Scores 1 and 0; both begin in a, the first goes on through b to the end, the second through c. gamma 1/2.

    Episodes: 0.5 and -0.5. Returns of the turns in a: 1/2 and 0, less their mean: 1/4 and -1/4, times the weight 2.
    """
    group = [walk(0, 1.0, ["a", "b"]), walk(1, 0.0, ["a", "c"])]
    algorithm = build_algorithm(GigpoConfig(scale="none", step_weight=2.0, step_gamma=0.5))
    assert algorithm.advantages(group) == [[1.0, 0.5], [-1.0, -0.5]]


def test_gigpo_divides_by_deviations_as_grpo_does():
    """As above: the deviations are 1/sqrt(2) of episodes and 1/(2 sqrt(2)) in a, so both parts are +-1/sqrt(2)."""
    group = [walk(0, 1.0, ["a", "b"]), walk(1, 0.0, ["a", "c"])]
    values = build_algorithm(GigpoConfig(step_gamma=0.5, epsilon=1e-12)).advantages(group)
    part = 1 / math.sqrt(2)
    assert [a for row in values for a in row] == pytest.approx([2 * part, part, -2 * part, -part])
