"""A plain function as a scorer: filled by name, checked in what it returns."""

from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from headrace.actors.scoring.reward_function import RewardScorer
from headrace.platform.errors import ConfigError
from headrace.platform.records import Message, RewardComponent, RewardKind, Role, Task
from headrace.platform.records.turn import ToolCallRecord
from headrace.platform.testing.conformance.scorer import SCORER_SUITE, ScorerContext
from headrace.platform.testing.episodes import make_episode, plain_turn, policy_turn

TASK = Task("t", "e", {"question": "2+2?", "answer": "4"})


def answered(text, *before):
    return make_episode((plain_turn(Role.USER, "2+2?"), *before, policy_turn(text)))


def value(reward, text="4", task=TASK, **options):
    (component,) = RewardScorer(reward, **options).score(task, answered(text))
    assert component.valid
    assert component.kind is RewardKind.OUTCOME
    return component.value


def exact(completion: str, answer: str) -> bool:
    return completion.strip() == answer


@pytest.mark.parametrize("name", SCORER_SUITE)
async def test_it_conforms(name):
    context = ScorerContext(make=lambda: RewardScorer(exact), task=TASK, good=answered("4"), bad=answered("5"))
    await SCORER_SUITE[name](context)


def test_parameters_are_filled_by_name():
    def reward(completion, messages, task, episode, question, answer, scale, bonus=1):
        assert (task["answer"], question) == ("4", "2+2?")
        assert messages == [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
        return scale * (completion == answer) + bonus + len(episode.turns)

    assert value(reward, args={"scale": 10}) == 13


def test_keyword_only_and_all_columns():
    assert value(lambda *, completion: len(completion)) == 1
    assert value(lambda **columns: len(columns)) == 2
    assert value(lambda completion, **columns: columns["answer"] == completion) == 1


def test_async_functions_are_awaited():
    async def reward(completion):
        return len(completion)

    scorer = RewardScorer(reward)
    assert [scorer.score(TASK, answered(text))[0].value for text in ("ab", "abc")] == [2, 3]
    scorer.close()


# case E3
def test_only_the_models_last_words_are_its_answer():
    def reward(completion):
        return completion == "4"

    told = plain_turn(Role.TOOL, "4")
    assert value(reward, "I looked it up") == 0
    (silent,) = RewardScorer(reward).score(TASK, make_episode((told,)))
    (after,) = RewardScorer(reward).score(TASK, make_episode((policy_turn("4"), told)))
    (before,) = RewardScorer(reward).score(TASK, answered("hm", policy_turn("4"), told))
    assert (silent.value, after.value, before.value) == (0, 1, 0)


def test_thoughts_are_no_part_of_the_answer_and_an_empty_one_is_an_answer():
    turn = policy_turn("", reasoning="it is 4")
    (component,) = RewardScorer(lambda completion: completion == "").score(TASK, make_episode((turn,)))
    assert (component.valid, component.value) == (True, 1)


def test_the_conversation_shows_calls_and_openings():
    call = ToolCallRecord(index=0, call_id="c1", name="add", arguments={"a": 1})
    episode = make_episode(
        (
            plain_turn(Role.USER, "be brief\n2+2?"),
            policy_turn("", tool_calls=(call,)),
            plain_turn(Role.TOOL, "4", tool_call_id="c1"),
            policy_turn("4"),
        )
    )
    seen = []

    def reward(messages):
        seen.extend(messages)
        return 0

    opening = (Message(Role.SYSTEM, "be brief"), Message(Role.USER, "2+2?"))
    RewardScorer(reward, opening=lambda row: opening).score(TASK, episode)
    assert seen == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "2+2?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "c1", "name": "add", "arguments": {"a": 1}}],
        },
        {"role": "tool", "content": "4", "tool_call_id": "c1"},
        {"role": "assistant", "content": "4"},
    ]


@pytest.mark.parametrize(
    "given",
    [
        *(0.5, Decimal("0.5"), Fraction(1, 2), np.float32(0.5), np.float64(0.5), np.array(0.5), torch.tensor(0.5)),
        torch.tensor(0.5, requires_grad=True),
        *(True, 1, np.bool_(True), np.int64(1), torch.tensor(True)),
    ],
)
def test_numbers_are_rewards(given):
    found = value(lambda: given)
    assert (type(found), found) == (float, 0.5 if given < 1 else 1.0)


def test_the_fields_of_components_become_plain():
    (component,) = RewardScorer(lambda: [RewardComponent("cost", np.float64(-1), np.bool_(True))]).score(
        TASK, answered("4")
    )
    assert component == RewardComponent(RewardKind.COST, -1.0)
    assert (type(component.kind), type(component.value), type(component.valid)) == (RewardKind, float, bool)


# case E1
@pytest.mark.parametrize(
    ("component", "told"),
    [
        (RewardComponent(RewardKind.OUTCOME, "1"), "str as the value of a reward; expected a number"),
        (RewardComponent(RewardKind.OUTCOME, np.float64("nan")), "as the value of a reward; expected a finite number"),
        (RewardComponent("outcme", 1.0), "'outcme' as the kind of a reward; expected one of outcome"),
        (RewardComponent(RewardKind.OUTCOME, 1.0, "yes"), "str as valid of a reward; expected a bool"),
        (RewardComponent(RewardKind.OUTCOME, 1.0, evidence=5), "int as the evidence of a reward; expected text"),
    ],
)
def test_a_component_with_a_wrong_field_is_refused(component, told):
    with pytest.raises((TypeError, ValueError), match=rf"^test_reward_function\.py:\d+: <lambda> returned .*{told}"):
        RewardScorer(lambda: (component,)).score(TASK, answered("4"))


def test_a_component_without_a_value_needs_none():
    (component,) = RewardScorer(lambda: [RewardComponent(RewardKind.OUTCOME, None, False, "no network")]).score(
        TASK, answered("4")
    )
    assert (component.valid, component.value, component.evidence) == (False, 0.0, "no network")


def test_components_are_rewards():
    parts = [RewardComponent(RewardKind.OUTCOME, 1.0), RewardComponent(RewardKind.FORMAT, 0.5)]
    assert RewardScorer(lambda: parts).score(TASK, answered("4")) == tuple(parts)


# case E1
@pytest.mark.parametrize(
    "given",
    [
        *(None, "1", [], [1.0], {"outcome": 1}, 1j, np.array([1.0, 2.0]), np.str_("1"), torch.zeros(2)),
        *(float("nan"), float("inf"), 10**400, Decimal("NaN"), Decimal("sNaN"), np.float32("inf"), torch.tensor(1e999)),
    ],
)
def test_what_is_no_reward_raises_and_names_the_function(given):
    def reward(completion):
        return given

    line = reward.__code__.co_firstlineno
    with pytest.raises((TypeError, ValueError), match=rf"^test_reward_function\.py:{line}: reward returned "):
        RewardScorer(reward).score(TASK, answered("4"))


def test_a_parameter_that_nothing_fills_is_named_with_what_there_is():
    def reward(completion, anwser):
        return 0

    scorer = RewardScorer(reward)
    message = r"reward takes 'anwser', but there is only completion, messages, task, episode, question, answer; did you"
    with pytest.raises(ConfigError, match=message):
        scorer.check_columns(TASK.data)
    with pytest.raises(ConfigError, match=message):
        scorer.score(TASK, answered("4"))


@pytest.mark.parametrize(
    ("reward", "args", "message"),
    [
        (5, {}, "reward must be a function, not 5"),
        (dict, {}, "reward must be a function"),
        (lambda *texts: 0, {}, r"takes \*texts, which has no name"),
        (lambda completion, /: 0, {}, "has no name"),
        (lambda completion: 0, {"scale": 1}, "has no parameter 'scale'; it takes completion"),
        (lambda completion: 0, {"completion": 1}, "'completion' is filled by headrace"),
    ],
)
def test_functions_that_cannot_be_called_by_name_are_refused(reward, args, message):
    with pytest.raises(ConfigError, match=message):
        RewardScorer(reward, args)


def test_the_version_names_the_function_and_its_file():
    assert RewardScorer(exact).version == RewardScorer(exact).version
    assert RewardScorer(exact).version.startswith("exact-")
    assert RewardScorer(exact).version != RewardScorer(test_async_functions_are_awaited).version
