"""The first door: rows and a reward. One question, one answer, graded in another process."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from episode_kit import char_call, make_plan, play, says

from headrace.actors.environments.adapter import as_async
from headrace.actors.environments.doors.single_turn import SingleTurn, SingleTurnEnvironment
from headrace.actors.environments.kind import Origin
from headrace.actors.environments.registry import environment_kind
from headrace.actors.scoring.process import ScorerProcess
from headrace.actors.worlds import Worlds
from headrace.platform.config.environments import EnvironmentConfig, ScorerConfig
from headrace.platform.config.tasks import TasksConfig
from headrace.platform.errors import ConfigError, EnvironmentFault
from headrace.platform.records import Message, Role, Status, Task, ToolCall
from headrace.platform.testing.conformance.environment import ENVIRONMENT_SUITE, EnvironmentContext
from headrace.platform.testing.fakes.renderer import END

ROWS = [{"prompt": f"{a}+{b}?", "answer": str(a + b)} for a in range(8) for b in range(8)]
SUMS = """\
import headrace
def reward(completion: str, answer: str) -> float:
    return float(completion.strip() == answer)
Sums = headrace.SingleTurn("sums.jsonl", reward=reward)
"""
BROKEN = """\
import headrace

def reward(completion, answer):
    return 1 / (completion == answer)

def late(completion):
    while True:
        pass

async def nothing(completion):
    return None

Broken = headrace.SingleTurn("sums.jsonl", reward=reward)
Late = headrace.SingleTurn("sums.jsonl", reward=late)
Nothing = headrace.SingleTurn("sums.jsonl", reward=nothing)
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "sums.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    (tmp_path / "sums.py").write_text(SUMS)
    (tmp_path / "broken.py").write_text(BROKEN)
    return tmp_path


def text(answer):
    return [*answer.encode(), END]


async def played(target, answer, *, deadline_s=10.0):
    """An episode of the target's first training task; `answer` is what is said, made from the row."""
    worlds = Worlds([EnvironmentConfig(name=target)], "train", 0)
    kind, setting = environment_kind(target), worlds.setting(0)
    scorer = ScorerProcess(kind.scorer.kind, kind.scorer.args, deadline_s=deadline_s)
    try:
        plan = make_plan(setting.task, seed=setting.seed)
        world = worlds.async_environment(setting.config)
        return await play(world, says(answer(setting.task.data)), plan=plan, scorer=scorer)
    finally:
        await scorer.close()
        await worlds.resources.close()


# case E1
async def test_right_wrong_raised_and_late_are_four_things(folder):
    right = await played(f"{folder}/sums.py:Sums", lambda row: text(f" {row['answer']} "))
    wrong = await played(f"{folder}/sums.py:Sums", lambda row: text("many"))
    raised = await played(f"{folder}/broken.py:Broken", lambda row: text("many"))
    late = await played(f"{folder}/broken.py:Late", lambda row: text("many"), deadline_s=1.0)
    nothing = await played(f"{folder}/broken.py:Nothing", lambda row: text("many"))
    assert [each.score for each in (right, wrong, raised, late, nothing)] == [1.0, 0.0, None, None, None]
    assert [len(each.rewards) for each in (right, wrong, raised, late, nothing)] == [1] * 5
    evidence = [each.rewards[0].evidence for each in (raised, late, nothing)]
    assert evidence[0] == "scorer raised: broken.py:4 in reward: ZeroDivisionError: division by zero"
    assert evidence[1] == "scorer timed out after 1 s"
    assert "broken.py:10: nothing returned None; expected a number" in evidence[2]
    assert right.rewards[0].grader_version.startswith("sums.py:Sums-")
    assert right.episode.environment == "Sums"
    assert right.episode.task.environment == "Sums"


async def test_an_empty_answer_is_an_answer(folder):
    empty = await played(f"{folder}/sums.py:Sums", lambda row: [END])
    assert (empty.score, empty.episode.status, empty.episode.terminated) == (0.0, Status.OK, True)


async def test_one_turn_is_all_whatever_is_said(folder):
    called = await played(f"{folder}/sums.py:Sums", lambda row: [*row["answer"].encode(), *char_call(1), END])
    assert sum(turn.is_action for turn in called.episode.turns) == 1
    assert (called.score, called.episode.terminated) == (1.0, True), "the text beside a needless call is the answer"


def environment(**options):
    return SingleTurnEnvironment("sums", **options)


@pytest.mark.parametrize("name", ENVIRONMENT_SUITE)
async def test_it_conforms(name):
    script = [Message(Role.ASSISTANT, "4")]
    await ENVIRONMENT_SUITE[name](
        EnvironmentContext(make=environment, task=Task("t", "sums", {"prompt": "2+2?"}), script=script)
    )


async def test_prompts_are_text_or_messages():
    async def opening(row, **options):
        return [
            (each.role, each.content) for each in (await environment(**options).reset(Task("t", "s", row), 0)).messages
        ]

    assert await opening({"prompt": "2+2?"}) == [("user", "2+2?")]
    assert await opening({"q": "2+2?"}, prompt="q", system="Add.") == [("system", "Add."), ("user", "2+2?")]
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "?"}, {"role": "user", "content": "2"}]
    assert await opening({"prompt": chat}) == [("user", "hi"), ("assistant", "?"), ("user", "2")]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "2+2?"}, "task t: there is no column 'prompt' for the prompt, only question"),
        ({"prompt": 5}, "the column 'prompt' holds 5; it must be text or a list of messages"),
        ({"prompt": []}, "it must be text or a list of messages"),
        ({"prompt": [{"role": "human", "content": "x"}]}, "has the role 'human'; known: system, user"),
        ({"prompt": [{"role": "user", "content": None}]}, "message 1 of 'prompt' must be"),
        ({"prompt": ["hi"]}, "message 1 of 'prompt' must be"),
    ],
)
async def test_a_row_that_cannot_be_asked_is_the_environments_fault(row, message):
    with pytest.raises(EnvironmentFault, match=message) as caught:
        await environment().reset(Task("t", "s", row), 0)
    assert not caught.value.transient


async def test_a_call_is_answered_and_ends_it():
    world = environment()
    await world.reset(Task("t", "s", {"prompt": "2+2?"}), 0)
    result = await world.step(Message(Role.ASSISTANT, "4", tool_calls=(ToolCall("add", {}, "c"),)), "k")
    assert (result.terminated, result.status) == (True, Status.MODEL_INVALID_ACTION)
    assert (result.messages[0].content, result.messages[0].tool_call_id) == (
        "error: there is no tool add; answer in words",
        "c",
    )


def test_it_is_used_as_it_is():
    with ThreadPoolExecutor(1) as executor:
        world = environment()
        assert as_async(world, executor) is world


# --- before anything starts -------------------------------------------------------------------------------------------


def worlds(folder, text, **config):
    (folder / "mine.py").write_text(f"import headrace\n{text}\n")
    return Worlds([EnvironmentConfig(name=f"{folder}/mine.py:Mine", **config)], "train", 0)


@pytest.mark.parametrize(
    ("text", "config", "message"),
    [
        ("Mine = headrace.SingleTurn('sums.jsonl', reward=None)", {}, r"^mine\.py:2: reward must be a function"),
        (
            "def reward(completion, anwser): ...\nMine = headrace.SingleTurn('sums.jsonl', reward=reward)",
            {},
            r"^mine\.py:2: reward takes 'anwser', but there is only completion, .*prompt; did you mean 'answer'",
        ),
        (
            "Mine = headrace.SingleTurn('sums.jsonl', reward=lambda completion: 0, prompt='question')",
            {},
            r"^mine\.py: Mine: there is no column 'question' for the prompt, only answer, prompt",
        ),
        (
            "Mine = headrace.SingleTurn('sum.jsonl', reward=lambda completion: 0)",
            {},
            r"sum\.jsonl does not exist; did you mean .*sums\.jsonl",
        ),
        (
            "Mine = headrace.SingleTurn('sums.jsonl', reward=lambda completion: 0)",
            {"args": {"size": 3}},
            "Mine takes no args, but size is given",
        ),
        ("Mine = headrace.SingleTurn(None, reward=lambda completion: 0)", {}, "Mine brings no tasks"),
        (
            "def reward(completion, anwser): ...\n"
            "Mine = headrace.SingleTurn(lambda seed: {'prompt': str(seed), 'answer': seed}, reward=reward)",
            {},
            r"^mine\.py:2: reward takes 'anwser', but there is only completion, .*answer; did you mean 'answer'",
        ),
        (
            "Mine = headrace.SingleTurn(lambda seed: {'question': str(seed)}, reward=lambda completion: 0)",
            {},
            r"^mine\.py: Mine: there is no column 'prompt' for the prompt, only question",
        ),
        (
            "def reward(completion, anwser): ...\nMine = headrace.SingleTurn(None, reward=reward)",
            {"tasks": {"source": "{folder}/sums.jsonl"}},
            r"^mine\.py:2: reward takes 'anwser'",
        ),
        (
            "Mine = headrace.SingleTurn(None, reward=lambda completion: 0, prompt='question')",
            {"tasks": {"source": "{folder}/sums.jsonl"}},
            r"^environments\.Mine\.tasks: there is no column 'question'",
        ),
    ],
)
def test_mistakes_are_found_at_the_start(folder, text, config, message):
    if "tasks" in config:
        config = {"tasks": {"source": config["tasks"]["source"].format(folder=folder)}}
    with pytest.raises(ConfigError, match=message):
        worlds(folder, text, **config)


@pytest.mark.parametrize("split", ["train", "dev"])
def test_a_wrong_column_is_found_in_every_split(folder, split):
    (folder / "mine.py").write_text(SUMS.replace("answer: str", "anwser: str").replace("== answer", "== anwser"))
    with pytest.raises(ConfigError, match=r"^mine\.py:2: reward takes 'anwser'"):
        Worlds([EnvironmentConfig(name=f"{folder}/mine.py:Sums")], split, 0)


def test_a_scorer_of_the_recipe_needs_no_column_of_the_reward(folder):
    text = "Mine = headrace.SingleTurn(None, reward=lambda completion, verdict: 0)"
    tasks = TasksConfig(source=f"{folder}/sums.jsonl")
    assert worlds(folder, text, tasks=tasks, scorer=ScorerConfig(kind="exact")).setting(0).task.data in ROWS


def test_rows_may_be_a_list_or_a_function(folder):
    listed = worlds(folder, f"Mine = headrace.SingleTurn({ROWS!r}, reward=lambda completion: 0)")
    assert listed.setting(0).task.data in ROWS
    made = "Mine = headrace.SingleTurn(lambda seed: {'prompt': str(seed)}, reward=lambda completion: 0)"
    (folder / "other.py").write_text(f"import headrace\n{made}\n")
    source = environment_kind(f"{folder}/other.py:Mine").tasks("train", 0, {})
    assert all(task.data["prompt"].isdigit() for task in source.next(5))


def test_splits_share_no_task(folder):
    kind = environment_kind(f"{folder}/sums.py:Sums")
    seen = [{task.task_id for task in kind.tasks(split, 0, {}).next(200)} for split in ("train", "dev", "hidden")]
    assert sum(map(len, seen)) == len(set().union(*seen)) == len(ROWS)


def test_the_world_changes_with_the_prompt_and_not_with_the_reward():
    origin = Origin(target="x.py:X", file=Path("x.py"))

    def version(reward, **options):
        return SingleTurn([], reward=reward, **options).environment_kind(origin).environment({}).version

    one, two = (lambda completion: 0), (lambda completion: 1)
    assert version(one) == version(two) != version(one, system="Add.")
