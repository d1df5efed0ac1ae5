"""Scorers that compare the final answer with the task's."""

import pytest

from headrace.actors.scoring import build_scorer
from headrace.platform.records import RewardKind, Role, Task
from headrace.platform.testing.episodes import make_episode, plain_turn, policy_turn


def answered(text, *before):
    return make_episode((plain_turn(Role.USER, "?"), *before, policy_turn(text)))


def judged(kind, gold, text, **args):
    (component,) = build_scorer(kind, args).score(Task("t", "e", {"answer": gold}), answered(text))
    assert component.valid
    assert component.kind is RewardKind.OUTCOME
    return component.value


MINUS_SEVEN = [
    *(f"x = {sign}7" for sign in "-\u2010\u2011\u2012\u2013\u2212\u2796\ufe63\uff0d"),
    *("-$7", "- 7", "\u2212 7", "- $7", "-\\$7", "-\u20ac7", "it is - 7", "= - 7.", "$-7$", "(-7)", "10 * -7", "1) -7"),
    "Result:\n- 7",
]
SEVEN = [
    *("10 - 7", "$10 - $7", "10-7", "10 -7", "10\u20137", "10 \u2212 7", "x - 7", "f(x) - 7", "f(x)-7", "10% - 7"),
    *("item-7", "$7", "the answer \u2013 7", "a list:\n- 5\n- 7", "US$ 7", "\uff17"),
]


@pytest.mark.parametrize(
    ("kind", "gold", "text", "args", "value"),
    [
        ("exact", "blue", " blue\n", {}, 1),
        ("exact", "blue", "Blue", {}, 0),
        ("exact", "blue", "Blue", {"ignore_case": True}, 1),
        ("exact", "blue", "it is blue", {}, 0),
        ("exact", "1", "21", {}, 0),  # case E4
        ("exact", 7, "7", {}, 1),
        ("numeric", "1", "21", {}, 0),  # case E4
        ("numeric", "1", "1.0", {}, 1),
        ("numeric", 1, "the sum of 20 and 1 is 21", {}, 0),
        ("numeric", 21, "20 + 1 = 21.", {}, 1),
        ("numeric", "1,234.5", "$1,234.50", {}, 1),
        ("numeric", -3, "x = -3", {}, 1),
        ("numeric", 3, "x = -3", {}, 0),
        ("numeric", 3, "5 - 2, that is 3", {}, 1),
        ("numeric", 2, "5-2", {}, 1),
        ("numeric", 2, "5 -2", {}, 1),
        ("numeric", "6.02e23", "about 6.02E+23", {}, 1),
        ("numeric", 3.14, "3.1", {}, 0),
        ("numeric", 3.14, "3.1", {"absolute": 0.05}, 1),
        ("numeric", 100, "101", {"relative": 0.01}, 1),
        ("numeric", 100, "101.1", {"relative": 0.01}, 0),
        ("numeric", 0.3, "0.3", {}, 1),
        ("numeric", 2**53, str(2**53 + 1), {}, 0),  # floats could not tell
        ("numeric", 1, "abc1", {}, 0),
        ("numeric", 1, "", {}, 0),
        ("numeric", 1, "none", {}, 0),
        *(("numeric", -7, text, {}, 1) for text in MINUS_SEVEN),
        *(("numeric", 7, text, {}, 1) for text in SEVEN),
        ("numeric", ".5", "0.5", {}, 1),
        ("numeric", 0.5, "about .5", {}, 1),
        ("numeric", -0.5, "\u2212.5", {}, 1),
        ("numeric", 5, ".5", {}, 0),
        ("numeric", 5, "so...5", {}, 1),
        ("numeric", "\u2212$1,234.5", "-$ 1,234.50", {}, 1),
        ("numeric", 1e-05, "1e\u22125", {}, 1),
        ("numeric", 1234, "1,2345", {}, 0),
        ("numeric", 3, "version 1.2.3", {}, 0),
        ("exact", True, "true", {}, 1),
        ("exact", False, "False", {}, 1),
        ("exact", True, "1", {}, 0),
        ("exact", 0.5, "0.5", {}, 1),
        ("regex", r"\d+ apples?", "12 apples", {}, 1),
        ("regex", r"\d+", "12 apples", {}, 0),
        ("regex", "1", "21", {}, 0),  # case E4
        ("regex", "yes.*", "Yes,\nindeed", {"ignore_case": True}, 1),
    ],
)
def test_answers(kind, gold, text, args, value):
    assert judged(kind, gold, text, **args) == value


# case E3
@pytest.mark.parametrize("kind", ["exact", "numeric", "regex"])
def test_an_answer_that_the_model_never_says_does_not_count(kind):
    scorer = build_scorer(kind, {})
    task = Task("t", "e", {"answer": "42"})
    tool = plain_turn(Role.TOOL, "42")
    said = (policy_turn("42"), plain_turn(Role.USER, "sure?"))
    for episode in (answered("I looked it up", tool), answered("no", *said), make_episode((tool,))):
        assert scorer.score(task, episode)[0].value == 0
    assert scorer.score(task, make_episode((policy_turn("42"), tool)))[0].value == 1


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        *((kind, {}) for kind in ("exact", "numeric", "regex")),
        *((kind, {"answer": gold}) for kind in ("exact", "numeric", "regex") for gold in (None, ["1"], {"a": 1})),
        *(("exact", {"answer": gold}) for gold in (float("nan"), float("inf"))),
        *(("numeric", {"answer": gold}) for gold in ("x", "", True, "1 2", "1,2", "7 apples", float("nan"), "10 - 7")),
        *(("regex", {"answer": gold}) for gold in ("(", 7, True)),
    ],
)
def test_a_task_that_cannot_be_judged_raises(kind, data):
    with pytest.raises(ValueError, match="answer"):
        build_scorer(kind, {}).score(Task("t", "e", data), answered("1"))
