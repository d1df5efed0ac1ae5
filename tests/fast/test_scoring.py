import asyncio
import os
import re
import sys
import time

import pytest

from headrace.actors.scoring import build_scorer
from headrace.actors.scoring.process import ScorerProcess
from headrace.platform.errors import ConfigError
from headrace.platform.records import RewardComponent, RewardKind, Role, Task
from headrace.platform.testing.episodes import make_episode, plain_turn, policy_turn


def answered(text, *before):
    return make_episode((plain_turn(Role.USER, "?"), *before, policy_turn(text)))


def judged(kind, gold, text, **args):
    (component,) = build_scorer(kind, args).score(Task("t", "e", {"answer": gold}), answered(text))
    assert component.valid
    assert component.kind is RewardKind.OUTCOME
    return component.value


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
    [("exact", {}), ("numeric", {"answer": "x"}), ("numeric", {"answer": True}), ("regex", {"answer": "("})],
)
def test_a_task_that_cannot_be_judged_raises(kind, data):
    with pytest.raises(ValueError, match="answer"):
        build_scorer(kind, {}).score(Task("t", "e", data), answered("1"))


@pytest.mark.parametrize(
    ("kind", "args", "message"),
    [
        ("exakt", {}, "did you mean 'exact'"),
        ("zzz", {}, "known: exact, numeric, regex"),
        ("numeric", {"tolerance": 1}, "absolute, relative"),
        ("no_such_module:X", {}, "there is no module 'no_such_module'"),
        (f"{__name__}:Scriptd", {}, "did you mean 'Scripted'"),
        (f"{__name__}:NoScorer", {}, "lacks score, score_group, version"),
        (f"{__name__}:Scripted", {"strict": True}, "its arguments: none"),
        (f"{__name__}:KIND", {}, "expected a reward function"),
        (f"{__name__}:half", {"digits": 1}, "half has no parameter 'digits'"),
    ],
)
def test_wrong_configuration_is_named(kind, args, message):
    with pytest.raises(ConfigError, match=message):
        build_scorer(kind, args)


class NoScorer:
    """Lacks everything."""


def half(completion, share=0.5):
    return share * len(completion)


class Scripted:
    """Does what the task says; runs in the child."""

    version = "1"

    def score(self, task, episode):
        do = task.data["do"]
        if do == "raise":
            raise RuntimeError("no grader today")
        if do == "loop":
            while True:
                pass
        if do == "die":
            os._exit(3)
        if do == "print":
            sys.stdout.write("noise" * 1000)
            sys.stdout.flush()
        value = {"nan": float("nan"), "pid": float(os.getpid())}.get(do, float(task.data.get("value", 0)))
        return "text" if do == "text" else (RewardComponent(RewardKind.OUTCOME, value, evidence=episode.episode_id),)

    def score_group(self, task, episodes):
        return [self.score(task, episode) for episode in episodes]


KIND = f"{__name__}:Scripted"


@pytest.fixture
async def process():
    process = ScorerProcess(KIND, {}, deadline_s=5)
    yield process
    await process.close()


async def do(process, what, **data):
    components = await process.score(Task("t", "e", {"do": what, **data}), make_episode())
    (component,) = components
    return component


# case E1
async def test_a_raise_a_time_out_and_a_true_zero_are_three_things():
    process = ScorerProcess(KIND, {}, deadline_s=1)
    try:
        await process.start()
        raised, late, zero = [await do(process, what) for what in ("raise", "loop", "value")]
    finally:
        await process.close()
    assert not raised.valid
    assert re.fullmatch(r"scorer raised: test_scoring\.py:\d+ in score: RuntimeError: no grader today", raised.evidence)
    assert (late.valid, late.evidence) == (False, "scorer timed out after 1 s")
    assert (zero.valid, zero.value, zero.evidence) == (True, 0.0, "test-run.t0.0.0")
    assert process.restarts == 1


async def test_one_process_serves_many_episodes_and_a_dead_one_is_replaced(process):
    first = await do(process, "pid")
    assert (await do(process, "pid")).value == first.value
    assert first.value != os.getpid()
    dead = await do(process, "die")
    # Not the code itself: asyncio reports 255 for a child that somebody else in the process has waited for.
    assert not dead.valid
    assert dead.evidence.startswith("scorer died with exit code")
    assert (await do(process, "pid")).value != first.value


async def test_what_is_not_a_reward_is_not_one(process):
    nan = await do(process, "nan")
    assert (nan.valid, nan.evidence) == (False, "scorer raised: ValueError: the scorer returned the value nan")
    text = await do(process, "text")
    assert (text.valid, text.evidence) == (
        False,
        "scorer raised: TypeError: the scorer returned str, not RewardComponent",
    )


async def test_what_a_scorer_prints_is_not_a_reply(process):
    assert (await do(process, "print", value=0.5)).value == 0.5


async def test_concurrent_scores_do_not_mix(process):
    values = await asyncio.gather(*(do(process, "value", value=n) for n in range(20)))
    assert [component.value for component in values] == list(range(20))


async def test_a_cancelled_score_does_not_leave_its_reply_to_the_next(process):
    await process.start()
    running = asyncio.ensure_future(do(process, "loop"))
    await asyncio.wait([running], timeout=0.1)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (await do(process, "value", value=1)).value == 1


async def test_a_scorer_that_cannot_be_built():
    process = ScorerProcess("exakt", {})
    with pytest.raises(ConfigError, match="did you mean 'exact'"):
        await process.start()
    component = await do(process, "value")
    assert not component.valid
    assert "scorer cannot be built" in component.evidence
    await process.close()
    await process.close()


async def test_close_ends_the_process(process):
    pid = int((await do(process, "pid")).value)
    await process.close()
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
    pytest.fail("the scorer's process outlived close()")


async def test_a_plain_function_grades_in_a_process_of_its_own(tmp_path):
    (tmp_path / "rewards.py").write_text(
        "import os\n"
        "from helpers import right\n"
        "def reward(completion, answer, share=1.0):\n"
        "    return share * right(completion, answer)\n"
    )
    (tmp_path / "helpers.py").write_text("def right(a, b):\n    return {'true': 1, 'false': 0}[str(a == b).lower()]\n")
    process = ScorerProcess(f"{tmp_path}/rewards.py:reward", {"share": 0.5})
    try:
        (right,) = await process.score(Task("t", "e", {"answer": "4"}), answered("4"))
        (wrong,) = await process.score(Task("t", "e", {"answer": "4"}), answered("5"))
        (raised,) = await process.score(Task("t", "e", {}), answered("5"))
    finally:
        await process.close()
    assert (right.valid, right.value, wrong.valid, wrong.value) == (True, 0.5, True, 0.0)
    assert not raised.valid
    assert "rewards.py:3: reward takes 'answer', but there is only completion, messages" in raised.evidence


async def test_a_function_that_does_not_load_names_its_line(tmp_path):
    (tmp_path / "rewards.py").write_text("\nreward = compliment\n")
    process = ScorerProcess(f"{tmp_path}/rewards.py:reward", {})
    try:
        (component,) = await process.score(Task("t", "e"), answered("5"))
        with pytest.raises(ConfigError, match=r"rewards\.py:2: NameError: name 'compliment'"):
            await process.start()
    finally:
        await process.close()
    assert not component.valid
    assert "rewards.py:2: NameError" in component.evidence


def test_the_version_of_a_function_follows_its_file_and_not_its_folder(tmp_path):
    versions = []
    for folder, text in (("a", "x = 1"), ("b", "x = 1"), ("c", "x = 2")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "rewards.py").write_text(text)
        versions.append(ScorerProcess(f"{tmp_path}/{folder}/rewards.py:reward", {}).version)
    assert versions[0] == versions[1] != versions[2]
    assert versions[0].startswith("rewards.py:reward-")
    assert ScorerProcess(f"{tmp_path}/a/rewards.py:reward", {"share": 1}).version != versions[0]
