"""What the host makes of a shell that is ended again and again, over a channel that answers from a script."""

import asyncio
import time

import pytest

from headrace.actors.sandboxes.processes import Process
from headrace.actors.sandboxes.shell import ANSWER_S, Shell, ShellState
from headrace.platform.contracts import BoxLimits
from headrace.platform.errors import SandboxDied

OURS = frozenset([Process(11, 1)])


class ScriptedChannel:
    """A shell in a box, of which `script` says how each `start` and each `run` ends: R or E, or D, with what follows.

    `sees`: whether the host sees its processes, and so can end them.
    """

    def __init__(self, *script, sees=True):
        self.script, self.sees, self.ended = list(script), sees, []
        self._queue = asyncio.Queue()
        self._token = self._life = b""

    async def write(self, data, until):
        head = data.split(b"\n")[0]
        if head.startswith(b"start "):
            self._token, name = head.split()[1:3]
            self._life = name
        else:
            name = head.split(b"|")[0]
        kind, rest = self.script.pop(0).encode().split(b" ", 1)
        name = self._life if kind == b"D" else name
        tail = b"/\0" if kind in b"ER" else b""
        self._queue.put_nowait((True, b"\0%b %b %b\0%b" % (kind, name, rest, tail)))
        mark = b"-" + name if kind == b"D" else name
        self._queue.put_nowait((False, b"\0%b %b\0" % (self._token, mark)))

    async def read(self, until, control):
        return await self._queue.get()

    async def interrupt(self):
        raise AssertionError("nobody asked for that")

    async def below(self):
        return OURS if self.sees else None

    async def end_below(self, but):
        self.ended.append(but)
        return True

    async def limit_hit(self):
        return ""

    def cause(self):
        return "it ended"


async def started(channel):
    shell = Shell(channel, BoxLimits(), ShellState(b"/", b""))
    await shell.begin()
    return shell


async def test_a_command_whose_shell_was_killed_by_a_signal_did_not_succeed():
    channel = ScriptedChannel("R 0 ", "D 0 1", "R 0 ", "D 0 ", "R 0 ", "E 0 ")
    shell = await started(channel)
    assert (await shell.run("grade", 1.0)).exit_code == 137
    assert channel.ended == [frozenset()], "what sent the signal may go on with it"
    assert (await shell.run("exit 0", 1.0)).exit_code == 0
    assert channel.ended == [frozenset()], "what an ended shell left goes on"
    assert (await shell.run("true", 1.0)).exit_code == 0


async def test_what_ends_a_shell_as_it_begins_is_ended_by_the_host():
    channel = ScriptedChannel("R 0 ", "D 138 1", "D 137 1", "R 0 ", "E 0 ")
    shell = await started(channel)
    assert (await shell.run("storm &", 1.0)).exit_code == 138
    assert channel.ended == [frozenset()] * 2, "all but the outer shell"
    assert (await shell.run("true", 1.0)).exit_code == 0


@pytest.mark.parametrize(
    ("sees", "ends", "message"), [(True, 2, "ends as it begins"), (False, 1, "processes end its shell")]
)
async def test_a_shell_that_never_begins_is_given_up_at_once(sees, ends, message):
    shell = await started(channel := ScriptedChannel("R 0 ", "D 138 1", *["D 137 1"] * ends, sees=sees))
    began = time.monotonic()
    with pytest.raises(SandboxDied, match=message):
        await shell.run("storm &", 1.0)
    assert time.monotonic() - began < ANSWER_S / 2
    assert not channel.script
    with pytest.raises(SandboxDied, match=message):
        await shell.run("true", 1.0)
