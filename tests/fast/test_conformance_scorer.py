import pytest

from headrace.actors.scoring import build_scorer
from headrace.platform.records import RewardComponent, RewardKind, Role, Task
from headrace.platform.testing.conformance.scorer import SCORER_SUITE, ScorerContext
from headrace.platform.testing.conformance.support import run_suite
from headrace.platform.testing.episodes import make_episode, plain_turn, policy_turn
from headrace.platform.testing.fakes.scorer import FixedScorer


def said(text, group):
    return make_episode((plain_turn(Role.USER, "?"), policy_turn(text)), group=group)


GOOD, BAD = said("21", 0), said("1", 1)


def context(make, answer="21"):
    return ScorerContext(make=make, task=Task("t", "e", {"answer": answer}), good=GOOD, bad=BAD)


def fixed(**settings):
    return FixedScorer(by_episode={BAD.episode_id: 0.0}, **settings)


@pytest.mark.parametrize("name", SCORER_SUITE)
@pytest.mark.parametrize("kind", ["fixed", "exact", "numeric", "regex"])
async def test_scorers_conform(kind, name):
    make = fixed if kind == "fixed" else lambda: build_scorer(kind, {})
    await SCORER_SUITE[name](context(make))


class Invalid(FixedScorer):
    def score(self, task, episode):
        return (RewardComponent(RewardKind.OUTCOME, valid=False),)


class Drifts(FixedScorer):
    calls = 0

    def score(self, task, episode):
        self.calls += 1
        return (RewardComponent(RewardKind.OUTCOME, float(self.calls)),)


class Shuffles(FixedScorer):
    def score_group(self, task, episodes):
        return sorted(super().score_group(task, episodes), key=lambda parts: parts[0].value)


@pytest.mark.parametrize(
    ("make", "check", "message"),
    [
        (Invalid, "good_and_bad_are_told_apart", "invalid reward"),
        (FixedScorer, "good_and_bad_are_told_apart", r"the bad episode got 1\.0, not 0\.0"),
        (lambda: fixed(error=ValueError("no grader")), "good_and_bad_are_told_apart", "no grader"),
        (Drifts, "scores_are_repeatable", "differs"),
        (lambda: Shuffles(by_episode={BAD.episode_id: 0.0}), "groups_keep_their_order", r"\[0\.0, 1\.0, 1\.0\]"),
        (lambda: FixedScorer(float("inf")), "rewards_survive_the_wire", "not finite"),
    ],
)
async def test_the_suite_finds_what_is_wrong(make, check, message):
    with pytest.raises(AssertionError, match=rf"{check}: .*{message}"):
        await run_suite({check: SCORER_SUITE[check]}, context(make))
