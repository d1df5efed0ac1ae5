"""`headrace env check` finds what is broken in an environment, by the check that should find it."""

import time
from pathlib import Path

import pytest
from box_kit import KitProvider

from headrace.actors.environments.registry import environment_kind
from headrace.deploy.environment_check import Outcome, check_environment
from headrace.deploy.environment_check.explanations import ABOUT
from headrace.deploy.environment_check.scripts import script_for
from headrace.platform.config.sandbox import SandboxConfig
from headrace.platform.errors import NotFound
from headrace.platform.records import Status
from headrace.platform.testing.conformance.environment import ENVIRONMENT_SUITE
from headrace.platform.testing.conformance.tasks import TASK_SUITE

COUNTER = '''\
"""Say `up` three times. The whole contract by hand, so that each rule can be broken."""
import asyncio, random, threading
from headrace import Message, Observation, RewardComponent, RewardKind, Role, Status, StepResult, hash_value

class Counter:
    name, version = "counter", "1"

    def __init__(self):
        self.count, self.ended, self.known, self.kept = None, False, {}, {}

    @staticmethod
    def tasks(split, seed):
        first = {"train": 0, "dev": 100, "hidden": 200}[split]
        return [{"start": first + n} for n in range(20)]

    @staticmethod
    def demonstrate(task):
        return [Message(Role.ASSISTANT, "up")] * 3

    def tools(self):
        return ()

    def reset(self, task, seed):
        self.count, self.ended, self.known = 0, False, {}
        return Observation((Message(Role.USER, "count"),), hash_value(self.count))

    def step(self, message, key):
        if key in self.known:
            said, result = self.known[key]
            if said != message:
                raise ValueError("this key had another message")
            return result
        if self.count is None or self.ended:
            raise RuntimeError("there is no episode")
        self.known[key] = (message, self.act(message))
        return self.known[key][1]

    def act(self, message):
        if message.tool_calls:
            said = Message(Role.TOOL, "there are no tools", tool_call_id=message.tool_calls[0].call_id)
            return StepResult((said,), status=Status.MODEL_INVALID_ACTION, state_hash=hash_value(self.count))
        self.count += 1
        self.ended = self.count == 3
        rewards = (RewardComponent(RewardKind.OUTCOME, 1.0),) if self.ended else ()
        said = () if self.ended else (Message(Role.USER, f"{self.count}"),)
        return StepResult(said, rewards, self.ended, state_hash=hash_value(self.count), metadata={"count": self.count})

    def snapshot(self):
        name = f"{len(self.kept)}"
        self.kept[name] = (self.count, self.ended)
        return name

    def restore(self, name):
        (self.count, self.ended), self.known = self.kept[name], {}

    def clone(self):
        twin = Counter()
        twin.count, twin.ended = self.count, self.ended
        return twin

    def close(self):
        self.ended = True
'''

BREAKAGES = {
    # what is broken: (a text, what it becomes, the check that finds it, what is said)
    "nondeterministic": ('USER, "count"', 'USER, f"{random.random()}"', "same_seed_same_world", "two resets"),
    "random answers": ('f"{self.count}"', 'f"{random.random()}"', "same_seed_same_world", "different at its step"),
    "state on the class": (
        "self.count += 1",
        "Counter.total = getattr(Counter, 'total', 0) + 1; self.count = Counter.total",
        "sessions_share_nothing",
        "",
    ),
    "step after the end": ("None or self.ended", "None", "the_script_ends_once", "a step after the end was accepted"),
    "a key acts twice": ("if key in self.known:", "if False:", "a_key_is_used_once", "would act twice"),
    "a key takes all": ("if said != message:", "if False:", "a_key_belongs_to_one_message", "it must raise"),
    "metadata is no JSON": (": self.count}", ": {1, 2}}", "everything_survives_the_wire", "not JSON-safe"),
    "metadata cannot be sent": (": self.count}", ": object()}", "it_plays", "metadata that is not JSON"),
    "step returns nothing": (
        "return self.known[key][1]",
        "return None",
        "it_plays",
        "Counter.step returned None; expected a headrace.StepResult",
    ),
    "reset returns text": (
        'return Observation((Message(Role.USER, "count"),), hash_value(self.count))',
        'return "count"',
        "it_plays",
        "Counter.reset returned str; expected a headrace.Observation",
    ),
    "reset raises": (
        "self.count, self.ended, self.known = 0, False, {}",
        'raise KeyError("board")',
        "it_plays",
        "counter.py:24 in reset: KeyError: 'board'",
    ),
    "step hangs": ("self.count += 1", "threading.Event().wait()", "it_plays", "no answer within 0.5 s"),
    "async step hangs": (
        "    def step(self, message, key):",
        "    async def step(self, message, key):\n        await asyncio.Event().wait()",
        "it_plays",
        "no answer within 0.5 s",
    ),
    "clone hangs": ("twin = Counter()", "threading.Event().wait()", "clones_are_independent", "no answer within 0.5 s"),
    "clone is no copy": ("twin = Counter()", "return self", "clones_are_independent", "counter.py"),
    "restore keeps keys": (
        ", self.known = self.kept[name], {}",
        " = self.kept[name]",
        "snapshots_go_back",
        "still known",
    ),
    "one snapshot for all": ("self.kept[name]", "self.kept['0']", "snapshots_go_back", "unknown snapshot"),
    "splits share tasks": ('"dev": 100', '"dev": 10', "splits_have_tasks", "of train is the same task as rows:"),
    "no dev tasks": ('"dev": 100, ', "", "splits_have_tasks", "dev: counter.py:13 in tasks: KeyError: 'dev'"),
    "unknown tools act": ("if message.tool_calls:", "if False:", "mistakes_of_the_model_are_answered", "has status OK"),
    "tools change": (
        "return ()",
        "from headrace import ToolSpec; return [ToolSpec(f'a{random.random()}')]",
        "tools_are_stable",
        "the tools changed",
    ),
    "close is no end": (
        "def close(self):\n        self.ended = True",
        "def close(self):\n        return",
        "close_is_safe_twice",
        "after close was accepted",
    ),
    "step before reset": (
        "self.kept = None,",
        "self.kept = 0,",
        "step_before_reset_raises",
        "before reset was accepted",
    ),
    "no reward": (
        "if self.ended else ()\n        said",
        "if False else ()\n        said",
        "it_is_scored",
        "gave a reward",
    ),
    "reward is endless": ("OUTCOME, 1.0", "OUTCOME, float('inf')", "it_plays", "returned inf as the value"),
    "constructor raises": (
        "self.count, self.ended, self.known, self.kept = None, False, {}, {}",
        "1 / 0",
        "it_loads",
        "counter.py:9 in __init__: ZeroDivisionError",
    ),
    "reset hangs": (
        "self.count, self.ended, self.known = 0, False, {}",
        "threading.Event().wait()",
        "it_plays",
        "reset gave no answer within 0.5 s",
    ),
    "async step blocks": (
        "    def step(self, message, key):",
        "    async def step(self, message, key):\n        threading.Event().wait()",
        "it_plays",
        "step gave no answer within 0.5 s, and blocks the event loop",
    ),
    "a second reset hangs": (
        "self.count, self.ended, self.known = 0, False, {}",
        "self.count is None or threading.Event().wait(); self.count, self.ended, self.known = 0, False, {}",
        "same_seed_same_world",
        "reset gave no answer within 0.5 s",
    ),
    "hangs instead of refusing": (
        'raise RuntimeError("there is no episode")',
        "threading.Event().wait()",
        "the_script_ends_once",
        "step gave no answer within 0.5 s",
    ),
    "no such module": ("import asyncio,", "import asyncoi,", "it_loads", "counter.py:2"),
    "clone is missing": ("def clone", "def copy", "it_loads", "it lacks clone()"),
    "shows too little": ("] * 3", "] * 2", "it_plays", "the episode goes on after them"),
    "shows too much": ("] * 3", "] * 4", "it_plays", "the episode ends after 3"),
    "shows words": ('[Message(Role.ASSISTANT, "up")]', '["up"]', "it_plays", "a list of headrace.Message"),
}


def written(folder: Path, source: str, name: str = "counter.py") -> str:
    (folder / name).write_text(source)
    return f"{folder / name}:{'Counter' if name == 'counter.py' else 'World'}"


def by_name(report):
    return {finding.name: finding for finding in report.findings}


def test_a_sound_environment_passes_every_check(tmp_path):
    report = check_environment(written(tmp_path, COUNTER))
    assert [finding for finding in report.findings if finding.outcome is not Outcome.OK] == []
    assert {"it_loads", "it_plays", "it_is_scored", *TASK_SUITE, *ENVIRONMENT_SUITE} <= set(by_name(report))
    assert report.passed


@pytest.mark.parametrize("broken", BREAKAGES)
def test_the_right_check_finds_it(tmp_path, broken):
    old, new, check, said = BREAKAGES[broken]
    assert old in COUNTER
    report = check_environment(
        written(tmp_path, COUNTER.replace(old, new)), tasks=1, deadline_s=0.5 if "wait()" in new else 20
    )
    finding = by_name(report)[check]
    assert finding.outcome is Outcome.FAILED, report.findings
    assert said in finding.explanation
    assert finding.mend == ABOUT[check].mend
    assert not report.passed


CLOSES_WHEN_FREE = """\
    async def close(self):
        while self.busy:
            await asyncio.sleep(0.01)
        self.let_go()

    def let_go(self):"""

ALONE = {
    # as BREAKAGES, but no other check finds them
    "a limit and an end at once": (
        "self.ended, state",
        "self.ended, self.ended, state",
        "terminated_is_not_truncated",
        "step 2 is terminated and truncated at once",
    ),
    "a limit that terminates": (
        "self.ended, state",
        "self.ended, False, Status.BUDGET_EXHAUSTED if self.ended else Status.OK, state",
        "terminated_is_not_truncated",
        "what a limit ended is truncated",
    ),
    "silence": (
        'else (Message(Role.USER, f"{self.count}"),)',
        "else ()",
        "terminated_is_not_truncated",
        "step 0 says nothing and does not end",
    ),
    "a closed session is seen by later ones": (
        "def close(self):\n        self.ended = True",
        "def close(self):\n        self.ended = True; Counter.closed = getattr(Counter, 'closed', 0) + 1",
        "a_replay_is_equal",
        "a replay differs first at reset, in its observation",
    ),
    "dice outside of the snapshot": (
        "self.count += 1",
        "self.count += 1; self.dice = self.dice or random.Random(1); drawn = self.dice.random()",
        "snapshots_keep_the_random_state",
        "after a restore to step 0 what comes next is different",
    ),
    "a cancelled step never lets go": (
        "    def step(self, message, key):",
        """    async def step(self, message, key):
        self.busy = True
        await asyncio.sleep(0)
        try:
            return self.do(message, key)
        finally:
            self.busy = False

    def do(self, message, key):""",
        "calls_end_in_time",
        "close after a cancelled step gave no answer within 0.5 s",
    ),
    "a tuple": (": self.count}", ": (self.count,)}", "everything_survives_the_wire", "not JSON-safe"),
}
ALONE_TOO = {
    "a closed session is seen by later ones": ('USER, "count"', "USER, f\"count {getattr(Counter, 'closed', 0)}\""),
    "dice outside of the snapshot": (
        'metadata={"count": self.count}',
        'metadata={"drawn": drawn if self.count == 1 else 0}',
    ),
    "a cancelled step never lets go": ("    def close(self):", CLOSES_WHEN_FREE),
}


@pytest.mark.parametrize("broken", ALONE)
def test_one_check_alone_finds_it(tmp_path, broken):  # cases X4, X15, X16, P26
    old, new, check, said = ALONE[broken]
    made = "None, False, {}, {}\n"
    source = COUNTER.replace(made, f"{made}        self.dice, self.busy = None, False\n")
    for before, after in ((old, new), ALONE_TOO.get(broken, ("", ""))):
        assert before in source
        source = source.replace(before, after) if before else source
    report = check_environment(written(tmp_path, source), tasks=1, deadline_s=0.5 if "busy = True" in new else 20)
    failed = {finding.name: finding for finding in report.findings if finding.outcome is Outcome.FAILED}
    failed.pop("it_is_scored", None)  # it plays an episode as a worker does, which some of this makes a fault
    assert list(failed) == [check], failed
    assert said in failed[check].explanation
    assert failed[check].mend == ABOUT[check].mend


def test_what_a_failure_hides_is_not_called_wrong(tmp_path):
    old, new, *_ = BREAKAGES["reset raises"]
    report = check_environment(written(tmp_path, COUNTER.replace(old, new)))
    assert [finding.name for finding in report.findings if finding.outcome is Outcome.FAILED] == ["it_plays"]
    assert by_name(report)["a_key_is_used_once"].explanation == "no episode can be played"
    assert by_name(report)["position_decides"].outcome is Outcome.OK


def test_random_play_where_nothing_is_demonstrated(tmp_path):
    report = check_environment(written(tmp_path, COUNTER.replace("def demonstrate", "def shown")))
    assert report.passed
    assert report.count(Outcome.NOT_SHOWN) == 0


def test_an_end_that_no_script_reaches_is_not_shown(tmp_path):
    endless = COUNTER.replace("def demonstrate", "def shown").replace("self.count == 3", "False")
    report = check_environment(written(tmp_path, endless))
    finding = by_name(report)["the_script_ends_once"]
    assert (finding.outcome, finding.explanation) == (
        Outcome.NOT_SHOWN,
        "no script ended the episode within 16 turns; give the environment demonstrate(task)",
    )
    assert by_name(report)["a_key_is_used_once"].outcome is Outcome.OK


def test_states_without_hashes_are_told_of(tmp_path):
    report = check_environment(
        written(
            tmp_path,
            COUNTER.replace("hash_value(self.count)", "__import__('headrace').platform.records.message.HashPair()"),
        )
    )
    assert by_name(report)["states_are_hashed"].outcome is Outcome.NOT_SHOWN


REWARD = """\
import headrace

def reward(completion, answer):
    return float(completion == answer)

World = headrace.SingleTurn([{"prompt": f"{n}", "answer": f"{n}"} for n in range(100)], reward=reward)
"""


def test_a_reward_that_raises_is_named_by_its_line(tmp_path):  # case E1
    broken = REWARD.replace("float(completion == answer)", "1 / 0")
    finding = by_name(check_environment(written(tmp_path, broken, "world.py")))["it_is_scored"]
    assert finding.outcome is Outcome.FAILED
    assert "world.py:4 in reward: ZeroDivisionError" in finding.explanation


def test_a_reward_that_hangs_is_found(tmp_path):
    broken = REWARD.replace("return", "__import__('time').sleep(60)\n    return")
    finding = by_name(check_environment(written(tmp_path, broken, "world.py"), deadline_s=2.0))["it_is_scored"]
    assert finding.outcome is Outcome.FAILED


def test_too_few_rows_for_the_splits_are_told_of(tmp_path):
    few = REWARD.replace("range(100)", "range(1)")
    report = check_environment(written(tmp_path, few, "world.py"))
    assert by_name(report)["splits_have_tasks"].outcome is Outcome.FAILED


TOOLS = '''\
from dataclasses import dataclass
from enum import Enum
from typing import Literal
import headrace

class Unit(Enum):
    METRE = "m"
    MILE = "mi"

@dataclass
class Place:
    town: str
    floor: int | None = None

def visit(
    place: Place, by: Literal["car", "bike"], stops: list[str], unit: Unit = Unit.METRE, share: float = 0.5
) -> str:
    """Visit a place."""
    return f"{place.town} by {by} in {unit.value}, {len(stops)} {share}"

ROWS = [{"prompt": f"{n}"} for n in range(100)]
World = headrace.ToolUse(ROWS, tools=[visit], reward=lambda completion: len(completion))
'''


async def test_random_play_fits_the_schemas_of_tools(tmp_path):
    kind = environment_kind(written(tmp_path, TOOLS, "world.py"))
    (task,) = kind.tasks("train", 0, {}).next(1)
    script = await script_for(lambda: kind.environment({}), task, 1)
    assert script.ends
    assert script.messages[0].tool_calls
    session = kind.environment({})
    await session.reset(task, 1)
    statuses = [(await session.step(message, f"{n}")).status for n, message in enumerate(script.messages)]
    assert set(statuses) == {Status.OK}


def test_args_reach_the_environment_and_wrong_ones_are_told_of(tmp_path):
    target = written(tmp_path, COUNTER.replace("def __init__(self):", "def __init__(self, step=1):"))
    assert check_environment(target, {"step": 2}).passed
    finding = by_name(check_environment(target, {"stepp": 2}))["it_loads"]
    assert "did you mean 'step'" in finding.explanation


def test_an_unknown_name_is_no_finding():
    with pytest.raises(NotFound, match="did you mean 'lookup'"):
        check_environment("lokup")


def test_every_check_is_explained():
    assert {*TASK_SUITE, *ENVIRONMENT_SUITE} <= set(ABOUT)


@pytest.mark.parametrize("name", ["lookup", "guess"])
def test_the_environments_that_headrace_ships_pass(name):
    assert check_environment(name).passed


def test_a_sandboxed_environment_passes_and_leaves_no_box():
    providers = []

    class Provider(KitProvider):
        closed = False

        async def close(self):
            await super().close()
            self.closed = True

    def provide(config):
        providers.append(Provider())
        return providers[-1]

    report = check_environment("lookup", sandbox=SandboxConfig(), provide=provide)
    assert [finding for finding in report.findings if finding.outcome is Outcome.FAILED] == []
    assert len(providers) > len(ENVIRONMENT_SUITE), "each check has boxes of its own, on its own event loop"
    assert all(not provider.live and provider.closed for provider in providers)


def test_an_environment_without_commands_takes_no_sandbox():
    finding = by_name(check_environment("guess", sandbox=SandboxConfig()))["it_loads"]
    assert finding.outcome is Outcome.FAILED
    assert "runs nothing that could be put into a sandbox" in finding.explanation


def test_deadlines_hold(tmp_path):
    old, new, *_ = BREAKAGES["step hangs"]
    began = time.monotonic()
    check_environment(written(tmp_path, COUNTER.replace(old, new)), deadline_s=0.2)
    assert time.monotonic() - began < 15
