"""What runs below a process, asked again and again; and the one timer of many deadlines."""

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from headrace.actors.sandboxes.alarm import Alarm
from headrace.actors.sandboxes.family import Family
from headrace.actors.sandboxes.processes import living


@pytest.fixture
def parent():
    """A shell that starts and waits for what it is told to."""
    shell = subprocess.Popen(["/bin/sh"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)

    def tell(line):
        shell.stdin.write(f"{line}; echo done\n")
        assert shell.stdout.readline() == "done\n"

    shell.tell = tell
    yield shell
    tell("kill $(jobs -p)")
    shell.stdin.close()
    shell.wait()
    shell.stdout.close()


def test_the_only_child_is_known_as_long_as_it_is_the_only_one(parent):
    family = Family(parent.pid)
    assert family.only_child() is None
    parent.tell("sleep 600 & first=$!")
    only = family.only_child()
    assert only is not None
    assert only == family.only_child() == living(parent.pid)
    parent.tell("sleep 600 & second=$!")
    assert family.only_child() is None
    parent.tell("kill $first; wait $first 2>/dev/null")
    other = family.only_child()
    assert other == living(parent.pid) != only
    parent.tell("kill $second; wait $second 2>/dev/null")
    assert family.only_child() is None
    family.close()
    family.close()


def test_a_child_with_a_child_is_looked_at_whole(parent, tmp_path):
    family = Family(parent.pid)
    os.mkfifo(way := tmp_path / "way")
    parent.tell(f"sh -c 'sleep 600 & echo up > {way}; wait' & read line < {way}")
    assert family.only_child() is None
    assert len(living(parent.pid)) == 2
    for process in living(parent.pid):
        os.kill(process.pid, signal.SIGKILL)
    family.close()


def test_a_child_with_threads_is_looked_at_whole(parent, tmp_path):
    family = Family(parent.pid)
    os.mkfifo(way := tmp_path / "way")
    text = (
        f"import threading, time; threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
        f"open('{way}', 'w').write('up'); time.sleep(600)"
    )
    (tmp_path / "threads.py").write_text(text)
    parent.tell(f"{sys.executable} {tmp_path}/threads.py & read line < {way}")
    assert family.only_child() is None
    family.close()


def test_of_a_process_that_has_ended_nothing_is_known():
    ended = subprocess.Popen(["true"])
    family = Family(ended.pid)
    ended.wait()
    assert family.only_child() is None
    family.close()


async def test_a_deadline_that_moves_on_rings_once_and_late_enough():
    loop, rung = asyncio.get_running_loop(), asyncio.Event()
    times = []

    def ring():
        times.append(loop.time())
        rung.set()

    alarm = Alarm(ring)
    alarm.set(loop.time() + 0.01)
    last = loop.time() + 0.05
    alarm.set(last)
    async with asyncio.timeout(5.0):
        await rung.wait()
    assert len(times) == 1
    assert times[0] >= last
    rung.clear()
    alarm.set(loop.time() + 600.0)
    alarm.set(loop.time() + 0.01)
    async with asyncio.timeout(5.0):
        await rung.wait()
    assert len(times) == 2
    alarm.set(loop.time())
    alarm.stop()
    alarm.stop()
    await asyncio.sleep(0)
    assert len(times) == 2
