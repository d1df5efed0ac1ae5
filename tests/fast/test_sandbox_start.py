"""Children that never become a shell, and channels that fail: the start is bounded, and says what it heard."""

import asyncio
import os
import time

import pytest

from headrace.actors.sandboxes.piped_process import PipedProcess
from headrace.actors.sandboxes.script import shell_argv
from headrace.actors.sandboxes.shell import Shell, ShellState
from headrace.platform.contracts import BoxLimits
from headrace.platform.errors import SandboxDied

SOON_S = 0.3
STATE = ShellState.first("/", {"PATH": "/usr/bin:/bin"})


@pytest.fixture
async def child():
    """Starts `sh -c` with a text; ends what it started."""
    started = []

    def start(text):
        started.append(PipedProcess(["/bin/sh", "-c", text], {"PATH": "/usr/bin:/bin"}))
        return started[-1]

    yield start
    for one in started:
        await one.close()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("head -c 1000000 /dev/zero | tr '\\0' x; sleep 600", "never got ready; it said: xxxx"),
        ("head -c 1000000 /dev/zero | tr '\\0' x >&2; sleep 600", "never got ready; it said: xxxx"),
        ("yes no", "never got ready; it said: no"),
        ("echo wait for me; sleep 600", "not ready within 0.3 s; it said: wait for me"),
        ("sleep 600", "not ready within 0.3 s"),
        ("echo it is broken >&2; exit 1", "ended; it said: it is broken"),
        ("exec >&- 2>&- <&-; sleep 600", "not ready within 0.3 s"),
    ],
)
async def test_a_child_that_never_gets_ready_is_given_up(child, text, message):  # case X7
    began = time.monotonic()
    shell = Shell(child(text), BoxLimits(), STATE)
    with pytest.raises(SandboxDied, match=message):
        await shell.listening(SOON_S)
    assert time.monotonic() - began < 5.0
    with pytest.raises(SandboxDied):
        await shell.run("true", 1.0)


async def test_what_was_never_followed_is_ended_whole(child, tmp_path):
    """A child's own children too: nothing tells yet which of them is the shell."""
    pids = tmp_path / "pids"
    process = child(f"sleep 600 & echo $! > {pids}; echo up; wait")
    assert await process.read() == (False, b"up\n")
    watched = os.pidfd_open(int(pids.read_text()))
    await process.close()
    await process.close()
    assert await _ended(watched)


async def test_a_shell_that_is_killed_is_noticed_at_once_by_every_call():  # case E13
    process = PipedProcess(shell_argv("/bin/sh", host=True), {})
    process.follow(process.pid)
    shell = Shell(process, BoxLimits(), STATE)
    await shell.listening(10.0)
    await shell.begin()
    pending = asyncio.create_task(shell.run("sleep 600", 600.0))
    await asyncio.sleep(0.05)
    began = time.monotonic()
    process.kill("a test killed it")
    with pytest.raises(SandboxDied, match="a test killed it"):
        await pending
    assert time.monotonic() - began < 0.2
    for call in (shell.run("true", 1.0), shell.quiet()):
        with pytest.raises(SandboxDied, match="a test killed it"):
            await call
    await process.close()


async def test_a_message_larger_than_a_pipe_is_written_whole_and_a_flood_waits():
    process = PipedProcess(shell_argv("/bin/sh", host=True), {})
    process.follow(process.pid)
    shell = Shell(process, BoxLimits(output_kb=8), STATE)
    await shell.listening(10.0)
    await shell.begin()
    text = "x" * 300_000
    done = await shell.run(f"cat <<'END' | wc -c\n{text}\nEND", 60.0)
    assert done.output.strip() == "300001"
    flood = await shell.run("head -c 30000000 /dev/zero", 60.0)
    assert (flood.exit_code, flood.truncated_bytes) == (0, 30_000_000 - 8192)
    await process.close()


async def test_what_is_larger_than_a_pipe_comes_on_both_ways():
    """Exports too, which nobody reads while the command still runs; and commands of every shape."""
    process = PipedProcess(shell_argv("/bin/sh", host=True), {})
    process.follow(process.pid)
    shell = Shell(process, BoxLimits(), STATE)
    await shell.listening(10.0)
    await shell.begin()
    grow = "A=x; i=0; while [ $i -lt 17 ]; do A=$A$A; i=$((i+1)); done; export A; echo ${#A}"
    assert (await shell.run(grow, 30.0)).output == "131072\n"
    assert len(shell.state.exports) > 131072
    for command, output in (
        ("echo ${#A}", "131072\n"),
        ("unset A; echo a\\|", "a|\n"),
        (" echo 'b  c' ", "b  c\n"),
        ("", ""),
        ("|", None),
        ("echo a\necho b", "a\nb\n"),
        ("echo 'c|d|'|cat", "c|d|\n"),
        ("IFS=01|; set -f; echo e", None),
        ("IFS=01; (exit 10); false", ""),
        ("echo f", "f\n"),
    ):
        done = await shell.run(command, 30.0)
        assert output is None or done.output == output, command
    assert (await shell.run("(exit 101)", 30.0)).exit_code == 101
    await process.close()


async def _ended(watched):
    """Whether the process of a descriptor ends soon."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(watched, ended.set)
    try:
        async with asyncio.timeout(5.0):
            await ended.wait()
        return True
    finally:
        loop.remove_reader(watched)
        os.close(watched)
