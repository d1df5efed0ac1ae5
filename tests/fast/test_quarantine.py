"""Broken tasks are taken out: who decides it, what is remembered, what is played instead (P27)."""

import asyncio
import itertools
from pathlib import Path

import msgspec
import pytest
from episode_kit import DONE, World, ends, make_plan, play, raises, says

from headrace.actors import task_judge
from headrace.actors.oracle import Finding, OracleVerdict
from headrace.actors.quarantine import (
    CANDIDATES,
    FILE,
    Quarantine,
    QuarantinedTask,
    QuarantineFile,
    first_not_out,
)
from headrace.actors.task_judge import MOST_BUGS, Doubt, Suspicions, TaskJudge
from headrace.platform.errors import EnvironmentFault, RunFailed, SandboxDied, SchemaError
from headrace.platform.records import InjectedFault, Task

BUG, DOWN = KeyError("board"), EnvironmentFault("its server is away")


async def episode(error=None, task_id="t", **fields):
    """One that ended with `error`, or well."""
    played = await play(
        World(raises(error) if error else lambda _: ends(0.0)), says(DONE), plan=make_plan(Task(task_id, "maze"))
    )
    return msgspec.structs.replace(played.episode, **fields)


class Asked:
    """An oracle that finds what it is told to, and counts."""

    def __init__(self, finding, cause=""):
        self.verdict = OracleVerdict(finding, cause)
        self.tasks = []

    async def __call__(self, environment, task, seed):
        self.tasks.append((environment, task.task_id, seed))
        await asyncio.sleep(0)
        return self.verdict


async def judged(oracle, *episodes, is_last=False):
    """What a judge makes of episodes that end one after the other."""
    judge = TaskJudge(Quarantine(), oracle)
    for each in episodes:
        judge.ended(each, is_last)
        await judge.settle()
    return judge


async def test_a_task_whose_demonstration_fails_is_out_at_once():
    oracle = Asked(Finding.BROKEN, "its demonstration earns 0")
    judge = await judged(oracle, await episode(BUG))
    (row,) = judge.found()
    assert (row.environment, row.task_id, row.environment_name, row.environment_version) == ("maze", "t", "world", "1")
    assert "its demonstration earns 0" in row.reason and "KeyError: 'board'" in row.reason
    assert row.episode_id == "kit-run.t0.0.0"
    assert judge.found() == [row], "told again: an answer may be lost"
    assert oracle.tasks == [("maze", "t", 7)]


async def test_a_task_that_works_keeps_its_place_and_the_fault_is_counted():
    oracle = Asked(Finding.WORKS)
    judge = await judged(oracle, *[await episode(BUG) for _ in range(2 * MOST_BUGS)])
    assert (judge.found(), judge.findings) == ([], {"works": 1})
    assert len(oracle.tasks) == 1, "the oracle is asked once a task"


async def test_without_an_oracle_some_bugs_and_nothing_valid_take_a_task_out():
    oracle = Asked(Finding.UNKNOWN, "nothing is demonstrated")
    judge = await judged(oracle, *[await episode(BUG) for _ in range(MOST_BUGS - 1)])
    assert judge.found() == []
    judge.ended(await episode(BUG), False)
    (row,) = judge.found()
    assert "3 of its episodes ended ENV_BUG" in row.reason
    assert len(oracle.tasks) == 1


@pytest.mark.parametrize("when", range(MOST_BUGS))
async def test_one_valid_episode_saves_a_task_that_no_oracle_knows(when):
    episodes = [await episode(BUG) for _ in range(2 * MOST_BUGS)]
    episodes.insert(when, await episode())
    assert (await judged(Asked(Finding.UNKNOWN), *episodes)).found() == []


async def test_bugs_that_end_while_the_oracle_is_asked_count():
    judge = TaskJudge(Quarantine(), Asked(Finding.UNKNOWN, "nothing is demonstrated"))
    for _ in range(MOST_BUGS):
        judge.ended(await episode(BUG), False)
    await judge.settle()
    assert len(judge.found()) == 1


async def test_a_transient_fault_is_in_doubt_when_its_slot_has_no_attempt_left():
    oracle = Asked(Finding.BROKEN, "reset hangs")
    assert (await judged(oracle, await episode(DOWN), is_last=False)).found() == []
    assert oracle.tasks == []
    assert len((await judged(oracle, await episode(DOWN), is_last=True)).found()) == 1


async def test_transient_faults_alone_take_no_task_out():
    judge = await judged(Asked(Finding.UNKNOWN), *[await episode(DOWN) for _ in range(9)], is_last=True)
    assert judge.found() == []


async def test_what_was_not_the_worlds_fault_asks_nobody():
    oracle = Asked(Finding.BROKEN, "never said")
    injected = (InjectedFault(1, "timeout"),)
    quiet = [
        await episode(SandboxDied("killed")),
        await episode(BUG, injected_faults=injected),
        await episode(DOWN, injected_faults=injected),
        await episode(),
    ]
    assert (await judged(oracle, *quiet, is_last=True)).found() == []
    assert oracle.tasks == []


async def test_tasks_are_told_apart():
    judge = await judged(Asked(Finding.UNKNOWN), *[await episode(BUG, f"t{n}") for n in range(9)])
    assert judge.found() == []


async def test_few_oracles_play_at_once_and_all_come_to_an_end():
    playing, most, free = set(), [], asyncio.Event()

    async def oracle(environment, task, seed):
        playing.add(task.task_id)
        most.append(len(playing))
        await free.wait()
        playing.discard(task.task_id)
        return OracleVerdict(Finding.BROKEN, "x")

    judge = TaskJudge(Quarantine(), oracle)
    for n in range(6):
        judge.ended(await episode(BUG, f"t{n}"), False)
    await asyncio.sleep(0)
    free.set()
    await judge.settle()
    assert max(most) == 2
    assert [row.task_id for row in judge.found()] == [f"t{n}" for n in range(6)]


async def test_a_judge_that_closes_waits_for_nobody():
    before = asyncio.all_tasks()

    async def oracle(environment, task, seed):
        await asyncio.Event().wait()

    judge = TaskJudge(Quarantine(), oracle)
    judge.ended(await episode(BUG), False)
    await asyncio.sleep(0)
    await judge.close()
    assert asyncio.all_tasks() == before
    assert judge.found() == []


async def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr(task_judge, "MOST_TASKS", 4)
    suspicions = Suspicions()
    for n in range(20):
        assert suspicions.note(await episode(task_id=f"t{n}"), False) is Doubt.NONE
    assert len(suspicions._known) == 4


def row(task_id="t", **fields):
    return QuarantinedTask(environment="maze", task_id=task_id, reason="it hangs", **fields)


def test_what_another_worker_found_is_out_here_too():
    quarantine = Quarantine()
    assert quarantine.observe([row(), row(), row("u")]) == [row(), row("u")]
    assert quarantine.observe([row("u", episode_id="later")]) == []
    assert quarantine.is_out("maze", Task("t", "maze"))
    assert not quarantine.is_out("other", Task("t", "maze"))
    assert not quarantine.is_out("maze", Task("t", "maze", version="2")), "a mended task has another version"
    assert quarantine.rows() == [row(), row("u")]


def test_rows_travel():
    one = row(split="dev", environment_name="world", environment_version="3", episode_id="e")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(one), type=QuarantinedTask) == one


def tasks(*ids):
    return (Task(task_id, "maze") for task_id in ids)


def test_the_next_task_that_is_not_out_is_played():
    quarantine = Quarantine()
    quarantine.observe([row("a"), row("b")])
    assert first_not_out(quarantine, "maze", tasks("a", "b", "c", "d")).task_id == "c"
    assert first_not_out(quarantine, "maze", tasks("d", "a")).task_id == "d"


def test_where_everything_is_out_the_search_ends_and_says_so():  # case E8
    quarantine = Quarantine()
    quarantine.observe([row("a")])
    taken = []

    def forever():
        for n in itertools.count():
            taken.append(n)
            yield Task("a", "maze")

    with pytest.raises(RunFailed, match=r"every task of maze .* is quarantined, 1 in all; a: it hangs"):
        first_not_out(quarantine, "maze", forever())
    assert len(taken) == CANDIDATES
    with pytest.raises(RunFailed, match="quarantined, 1 in all; a"):
        first_not_out(quarantine, "maze", tasks("a"))


def test_the_file_is_read_again_on_a_resume(tmp_path):
    file = QuarantineFile(str(tmp_path))
    assert file.read() == []
    file.append([])
    assert not (tmp_path / FILE).exists()
    rows = [row("a", environment_name="world", environment_version="1"), row("b", environment_name="elsewhere")]
    file.append(rows[:1])
    file.append(rows[1:])
    with (tmp_path / FILE).open("ab") as torn:
        torn.write(b'{"environment": "maz')
    assert QuarantineFile(str(tmp_path)).read() == rows
    QuarantineFile(str(tmp_path)).append([row("c")])
    assert [each.task_id for each in file.read()] == ["a", "b", "c"]


def test_a_world_that_was_mended_gets_its_tasks_back(tmp_path):
    file = QuarantineFile(str(tmp_path))
    file.append([row("a", environment_name="world", environment_version="1"), row("b", environment_name="unknown")])
    assert [each.task_id for each in file.read({"world": {"1"}})] == ["a", "b"]
    assert [each.task_id for each in file.read({"world": {"2"}})] == ["b"]


def test_a_row_of_another_schema_is_refused(tmp_path):
    Path(tmp_path / FILE).write_bytes(b'{"schema_version": 2, "environment": "e", "task_id": "t", "reason": "r"}\n')
    with pytest.raises(SchemaError, match="schema 2; this build reads 1"):
        QuarantineFile(str(tmp_path)).read()
