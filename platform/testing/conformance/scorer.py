"""What every `Scorer` must do. Run each function of `SCORER_SUITE` with a context of your own."""

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import msgspec

from headrace.platform.contracts import Scorer
from headrace.platform.records.episode import Episode
from headrace.platform.records.message import RewardComponent, Task


@dataclass(kw_only=True, slots=True, frozen=True)
class ScorerContext:
    """What the suite runs against: a good episode of `task` and a bad one, and what they should get in all."""

    make: Callable[[], Scorer]
    task: Task
    good: Episode
    bad: Episode
    good_total: float = 1.0
    bad_total: float = 0.0


async def good_and_bad_are_told_apart(context: ScorerContext) -> None:
    """A bad answer is a valid reward, often 0; an invalid one says that grading failed (case E1)."""
    scorer = context.make()
    for name, episode, wanted in (
        ("good", context.good, context.good_total),
        ("bad", context.bad, context.bad_total),
    ):
        components = scorer.score(context.task, episode)
        assert components, f"the {name} episode got no component at all"
        assert all(component.valid for component in components), f"the {name} episode got an invalid reward"
        total = sum(component.value for component in components)
        assert math.isclose(total, wanted), f"the {name} episode got {total}, not {wanted}"


async def scores_are_repeatable(context: ScorerContext) -> None:
    """The same episode gets the same reward, from the same scorer and from another one."""
    scorer = context.make()
    first = list(scorer.score(context.task, context.good))
    scorer.score(context.task, context.bad)
    assert list(scorer.score(context.task, context.good)) == first, "the second score of an episode differs"
    assert list(context.make().score(context.task, context.good)) == first, "another scorer gives another score"


async def groups_keep_their_order(context: ScorerContext) -> None:
    """One sequence of components an episode, in the order of the episodes."""
    group = [context.good, context.bad, context.good]
    scored = context.make().score_group(context.task, group)
    assert len(scored) == len(group), f"{len(group)} episodes got {len(scored)} scores"
    values = [sum(component.value for component in components) for components in scored]
    assert values[0] == values[2] and values[0] > values[1], f"good, bad and good got {values}"


async def scorers_name_their_version(context: ScorerContext) -> None:
    """A stored reward says which grader gave it."""
    version = context.make().version
    assert version, "a scorer has a version"
    assert version == context.make().version, "two scorers with the same settings have two versions"


async def rewards_survive_the_wire(context: ScorerContext) -> None:
    """Components are finite numbers and come out of the scorer's process as they were."""
    components: Sequence[RewardComponent] = list(context.make().score(context.task, context.good))
    assert all(math.isfinite(component.value) for component in components), f"a reward is not finite: {components}"
    data = msgspec.msgpack.encode(components)
    assert msgspec.msgpack.decode(data, type=list[RewardComponent]) == components, "a reward changes in a hop"


SCORER_SUITE: dict[str, Callable[[ScorerContext], Awaitable[None]]] = {
    check.__name__: check
    for check in (
        good_and_bad_are_told_apart,
        scores_are_repeatable,
        groups_keep_their_order,
        scorers_name_their_version,
        rewards_survive_the_wire,
    )
}
