"""Scorers by kind, and the process that they run in."""

import asyncio
import os
import re
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from headrace.actors.scoring import build_scorer
from headrace.actors.scoring.pool import build_scorer_process
from headrace.actors.scoring.process import ScorerProcess
from headrace.platform.config.environments import ScorerConfig
from headrace.platform.errors import ConfigError
from headrace.platform.records import RewardComponent, RewardKind, Role, Task
from headrace.platform.testing.episodes import make_episode, plain_turn, policy_turn


def answered(text):
    return make_episode((plain_turn(Role.USER, "?"), policy_turn(text)))


@pytest.mark.parametrize(
    ("kind", "args", "message"),
    [
        ("exakt", {}, "did you mean 'exact'"),
        ("numeri", {}, r"did you mean 'numeric'\? Your own is written \./file\.py:Name$"),
        ("zzz", {}, r"known: exact, numeric, regex, reasoning_gym\. Your own"),
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
        if do == "flood":
            sys.stderr.write("line\n" * 50_000)
        if do == "meet":
            return self.meet(Path(task.data["folder"]))
        if do == "complain":
            sys.stderr.write("out of chalk\nmore than once\n")
            os._exit(3)
        if do == "stdin":
            return (RewardComponent(RewardKind.OUTCOME, 1.0, evidence=repr(sys.stdin.read()) + repr(os.read(0, 9))),)
        if do == "numpy":
            return [RewardComponent("format", np.float64(0.5), np.bool_(True))]
        value = {"nan": float("nan"), "pid": float(os.getpid())}.get(do, float(task.data.get("value", 0)))
        return "text" if do == "text" else (RewardComponent(RewardKind.OUTCOME, value, evidence=episode.episode_id),)

    @staticmethod
    def meet(folder):
        """Wait until another process is here too."""
        (folder / str(os.getpid())).touch()
        while len(list(folder.iterdir())) < 2:
            time.sleep(0.01)
        return (RewardComponent(RewardKind.OUTCOME, float(os.getpid())),)

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
    line = Scripted.score.__code__.co_firstlineno
    told = (
        f"scorer raised: ValueError: test_scoring.py:{line}: score returned nan as the value of a reward; expected a f"
    )
    assert nan.evidence.startswith(told)
    text = await do(process, "text")
    told = f"TypeError: test_scoring.py:{line}: score returned str; expected a sequence of headrace.RewardComponent"
    assert text.evidence == f"scorer raised: {told}"
    assert not (nan.valid or text.valid)


async def test_what_a_scorer_returns_becomes_plain(process):
    plain = await do(process, "numpy")
    assert (plain.kind, plain.value, plain.valid) == (RewardKind.FORMAT, 0.5, True)
    assert type(plain.value) is float
    assert type(plain.valid) is bool


async def test_a_scorer_reads_no_request(process):
    assert (await do(process, "stdin")).evidence == "''b''"
    assert (await do(process, "value", value=1)).value == 1


async def test_what_it_says_before_it_dies_is_told(process):
    dead = await do(process, "complain")
    assert not dead.valid
    assert re.fullmatch(r"scorer died with exit code \d+: out of chalk \| more than once", dead.evidence)


async def test_what_it_says_before_it_dies_at_its_start_is_told(tmp_path):
    (tmp_path / "rewards.py").write_text("import os\nprint('no licence')\nos._exit(5)\n")
    process = ScorerProcess(f"{tmp_path}/rewards.py:reward", {})
    with pytest.raises(ConfigError, match=r"^start of the scorer died with exit code \d+: no licence$"):
        await process.start()
    await process.close()


async def test_what_it_prints_goes_to_the_log_up_to_a_limit(process, caplog):
    caplog.set_level("INFO", logger="headrace")
    await do(process, "print")
    await process.close()
    (line,) = [record.getMessage() for record in caplog.records if "noise" in record.getMessage()]
    assert line == f"scorer test_scoring:Scripted: {'noise' * 100}"


async def test_a_flood_of_lines_neither_blocks_nor_floods_the_log(process, caplog):
    caplog.set_level("INFO", logger="headrace")
    assert (await do(process, "flood", value=0.5)).value == 0.5
    await process.close()
    lines = [record.getMessage() for record in caplog.records if "Scripted: " in record.getMessage()]
    assert len(lines) == 1001
    assert lines[-1].endswith("further ones are not logged)")


async def test_a_closed_scorer_starts_no_more(process):
    running = [asyncio.ensure_future(do(process, "loop")) for _ in range(3)]
    await asyncio.wait(running, timeout=0.1)
    await process.close()
    assert [(await each).valid for each in running] == [False] * 3
    assert (await do(process, "value")).evidence == "scorer is closed"


async def test_a_pool_grades_at_once_and_starts_no_more_than_it_needs(tmp_path):
    pool = build_scorer_process(ScorerConfig(kind=KIND, deadline_s=30, processes=3))
    try:
        await pool.start()
        alone = [(await do(pool, "pid")).value for _ in range(3)]
        met = await asyncio.gather(*(do(pool, "meet", folder=str(tmp_path)) for _ in range(2)))
        again = (await do(pool, "pid")).value
        many = await asyncio.gather(*(do(pool, "value", value=n) for n in range(20)))
    finally:
        await pool.close()
    assert set(alone) == {again}
    assert len({component.value for component in met}) == 2
    assert [component.value for component in many] == list(range(20))
    assert pool.version == ScorerProcess(KIND, {}).version
    assert pool.restarts == 0


async def test_one_process_needs_no_pool():
    assert isinstance(build_scorer_process(ScorerConfig(kind="exact")), ScorerProcess)


async def test_files_of_the_current_folder_hide_nothing_of_python(tmp_path, monkeypatch):
    for name in ("random", "queue", "struct", "select"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('not the one you want')\n")
    (tmp_path / "my_helper.py").write_text("value = 0.25\n")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "rewards.py").write_text(
        "import queue, random\nfrom my_helper import value\ndef reward():\n    return value\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    process = ScorerProcess("elsewhere/rewards.py:reward", {})
    try:
        (component,) = await process.score(Task("t", "e"), answered("5"))
    finally:
        await process.close()
    assert (component.value, component.evidence) == (0.25, "")


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
