"""What every `Algorithm` must do. Run each function of `ALGORITHM_SUITE` on a factory of yours.

The loss is checked through a backend (`backend.py`), because its batch is the backend's own type.
"""

import math
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from headrace.platform.contracts import Algorithm, ScoredEpisode
from headrace.platform.records.ids import AttemptId
from headrace.platform.records.message import Task
from headrace.platform.records.status import RewardKind, Role
from headrace.platform.records.tables import RewardRow
from headrace.platform.testing.episodes import make_episode, plain_turn, policy_turn

AlgorithmFactory = Callable[[], Algorithm]
_TASK = Task("task-1", "counter", {"answer": "1"})


def scored(sample: int, score: float, turns: int = 1, seed: int = 0, task_seed: int = 0) -> ScoredEpisode:
    """An episode of group 0 with `turns` policy turns, and its score."""
    pairs = [(plain_turn(Role.USER), policy_turn()) for _ in range(turns)]
    episode = make_episode(
        [turn for pair in pairs for turn in pair] or [plain_turn(Role.USER)],
        attempt_id=AttemptId("test-run", 0, sample),
        task=_TASK if task_seed == 0 else msgspec.structs.replace(_TASK, seed=task_seed),
        seed=seed,
    )
    row = RewardRow(episode_id=episode.episode_id, kind=RewardKind.OUTCOME, value=score)
    return ScoredEpisode(episode, score, (row,))


async def one_advantage_per_policy_turn(factory: AlgorithmFactory) -> None:
    """Observation turns earn none; episodes of one group may differ in length."""
    group = [scored(0, 1.0, turns=3), scored(1, 0.0, turns=1), scored(2, 0.5, turns=2)]
    counts = [len(values) for values in factory().advantages(group)]
    assert counts == [3, 1, 2], f"episodes with 3, 1 and 2 policy turns got {counts} advantages"


async def advantages_are_finite(factory: AlgorithmFactory) -> None:
    """For equal scores too, where a standard deviation is 0."""
    for scores in ([1.0, 0.0], [0.5, 0.5], [0.0, 0.0, 1e-9]):
        values = factory().advantages([scored(i, score) for i, score in enumerate(scores)])
        assert all(math.isfinite(v) for row in values for v in row), f"scores {scores} give {values}"


async def better_scores_earn_more(factory: AlgorithmFactory) -> None:
    """The order of advantages is that of the scores."""
    first = [row[0] for row in factory().advantages([scored(i, s) for i, s in enumerate([0.0, 2.0, 1.0])])]
    assert first[0] < first[2] < first[1], f"scores 0, 2, 1 give advantages {first}"


async def equal_scores_teach_nothing(factory: AlgorithmFactory) -> None:
    """An algorithm that needs variance gives 0 where there is none."""
    algorithm = factory()
    values = algorithm.advantages([scored(i, 0.7) for i in range(4)])
    flat = [abs(v) for row in values for v in row]
    assert not algorithm.needs_variance or max(flat) < 1e-6, f"four equal scores give {values}"


async def a_common_bonus_changes_nothing(factory: AlgorithmFactory) -> None:
    """An algorithm that compares the members of a group does not see what all of them got."""
    algorithm = factory()
    one, other = ([scored(i, s + bonus) for i, s in enumerate([1.0, 0.0, 0.5])] for bonus in (0.0, 8.0))
    before, after = algorithm.advantages(one), algorithm.advantages(other)
    assert not algorithm.needs_variance or _near(before, after), f"a bonus of 8 for all turns {before} into {after}"


async def the_order_of_members_changes_nothing(factory: AlgorithmFactory) -> None:
    """Every member has its own advantage, wherever it stands (case V6)."""
    group = [scored(0, 1.0, turns=2), scored(1, 0.0), scored(2, 0.25, turns=3)]
    algorithm = factory()
    forth, back = algorithm.advantages(group), algorithm.advantages(group[::-1])
    assert _near(forth, back[::-1]), f"the same members in another order: {forth} and {back[::-1]}"


async def a_member_that_never_acted_gets_nothing(factory: AlgorithmFactory) -> None:
    """It has no policy turn that could be credited, and is no reason to refuse the others."""
    values = factory().advantages([scored(0, 1.0, turns=2), scored(1, 0.5), scored(2, 0.0, turns=0)])
    assert [len(row) for row in values] == [2, 1, 0], f"two turns, one and none got {values}"


async def unequal_seeds_are_refused(factory: AlgorithmFactory) -> None:
    """Scores from another task or another world are no baseline."""
    _raises(factory, [scored(0, 1.0, seed=1), scored(1, 0.0, seed=2)], "environment seeds 1 and 2")
    _raises(factory, [scored(0, 1.0, task_seed=1), scored(1, 0.0, task_seed=2)], "task seeds 1 and 2")


async def advantages_are_a_function(factory: AlgorithmFactory) -> None:
    """The same group gives the same advantages, on the same object and on another."""
    group = [scored(0, 1.0), scored(1, 0.0), scored(2, 0.0)]
    one, other = factory(), factory()
    results = [[list(row) for row in algorithm.advantages(group)] for algorithm in (one, one, other)]
    assert results[0] == results[1] == results[2], f"three calls on one group differ: {results}"


def _near(one: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> bool:
    return all(
        math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-9)
        for x, y in zip(one, other, strict=True)
        for a, b in zip(x, y, strict=True)
    )


def _raises(factory: AlgorithmFactory, group: Sequence[ScoredEpisode], what: str) -> None:
    try:
        factory().advantages(group)
    except ValueError:
        return
    raise AssertionError(f"a group with {what} must raise ValueError")


ALGORITHM_SUITE: dict[str, Callable[[AlgorithmFactory], Awaitable[None]]] = {
    check.__name__: check
    for check in (
        one_advantage_per_policy_turn,
        advantages_are_finite,
        better_scores_earn_more,
        equal_scores_teach_nothing,
        a_common_bonus_changes_nothing,
        the_order_of_members_changes_nothing,
        a_member_that_never_acted_gets_nothing,
        unequal_seeds_are_refused,
        advantages_are_a_function,
    )
}
