"""What a reward starts does not outlive its time, its scorer, or the process that had it graded."""

import asyncio
import signal
import subprocess
import sys
import time

import psutil
import pytest

from headrace.actors.scoring.process import ScorerProcess
from headrace.platform.records import Task
from headrace.platform.testing.episodes import make_episode

REWARDS = """
import os, subprocess

def slow(folder):
    child = subprocess.Popen(["sleep", "600"])
    with open(f"{folder}/new", "w") as file:
        file.write(f"{os.getpid()} {child.pid}")
    os.rename(f"{folder}/new", f"{folder}/pids")
    return child.wait()

def leaves(folder):
    child = subprocess.Popen(["sleep", "600"])
    with open(f"{folder}/pids", "w") as file:
        file.write(f"{os.getpid()} {child.pid}")
    os._exit(4)

def reads():
    return len(subprocess.run(["cat"], stdout=subprocess.PIPE, timeout=20).stdout)
"""

PARENT = """
import asyncio, sys
from headrace.actors.scoring.process import ScorerProcess
from headrace.platform.records import Task
from headrace.platform.testing.episodes import make_episode

folder = sys.argv[1]
process = ScorerProcess(f"{folder}/rewards.py:slow", {}, deadline_s=600)
asyncio.run(process.score(Task("t", "e", {"folder": folder}), make_episode()))
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "rewards.py").write_text(REWARDS)
    return tmp_path


def is_gone(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def until(condition, what, limit_s=30):
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def are_gone(folder):
    pids = [int(pid) for pid in (folder / "pids").read_text().split()]
    until(lambda: all(map(is_gone, pids)), f"{pids} live on")


async def graded(folder, name, **options):
    process = ScorerProcess(f"{folder}/rewards.py:{name}", {}, **options)
    try:
        (component,) = await process.score(Task("t", "e", {"folder": str(folder)}), make_episode())
    finally:
        await process.close()
    return component


async def test_a_time_out_ends_what_the_reward_started(folder):
    component = await graded(folder, "slow", deadline_s=2)
    assert component.evidence == "scorer timed out after 2 s"
    are_gone(folder)


async def test_a_death_ends_what_the_reward_started(folder):
    component = await graded(folder, "leaves")
    assert component.evidence.startswith("scorer died with exit code")
    are_gone(folder)


async def test_close_ends_what_the_reward_started(folder):
    process = ScorerProcess(f"{folder}/rewards.py:slow", {}, deadline_s=600)
    score = asyncio.ensure_future(process.score(Task("t", "e", {"folder": str(folder)}), make_episode()))
    await asyncio.to_thread(until, (folder / "pids").exists, "the reward did not begin")
    await process.close()
    (component,) = await score
    assert not component.valid
    are_gone(folder)


def test_a_killed_parent_takes_the_reward_and_what_it_started_along(folder):
    with subprocess.Popen([sys.executable, "-c", PARENT, str(folder)]) as parent:
        until((folder / "pids").exists, "the reward did not begin")
        parent.send_signal(signal.SIGKILL)
    are_gone(folder)


async def test_a_subprocess_of_the_reward_reads_no_request(folder):
    component = await graded(folder, "reads", deadline_s=30)
    assert (component.value, component.evidence) == (0.0, "")
