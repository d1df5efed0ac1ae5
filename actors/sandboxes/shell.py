"""One long-lived shell over a channel: frames commands, bounds what they print, ends those that outrun a limit.

Every kind of box drives its shell through this, so that all behave alike. What the shell itself is, and what is said to
it, stands in script.py. The order of a box's life: `listening` (the shell is there and has run nothing yet: the moment
to confine it), `begin`, then `run` and `quiet` as often as one likes.

Invariants: a call that is cut off leaves nothing that a later one could take for its own answer; directory and exported
variables are those after the last command that ended by itself; a shell that does not answer, or is gone, raises
SandboxDied from this and every later call (case E13). Opening and closing the channel are left to who made it.
"""

import asyncio
import secrets
import shlex
import time
from collections.abc import Mapping
from typing import Protocol

import msgspec

from headrace.actors.sandboxes.output import Output
from headrace.platform.contracts import BoxLimits, CommandResult
from headrace.platform.errors import SandboxDied

ANSWER_S = 10.0
"""How long the shell may take to answer where it runs nothing of the agent's."""
_MOST_CONTROL = 1 << 20
_MOST_NOISE = 1 << 16
_FLOOD = 1 << 20
_PACE_S = 0.001
_SYNTAX = 2


class Channel(Protocol):
    """The way to a box's shell: its standard streams, and the few things that only who made it can do.

    All raise SandboxDied when the box is gone, except `read`, `cause` and `limit_hit`.
    """

    async def write(self, data: bytes) -> None:
        """To the shell's standard input, all of it."""

    async def read(self) -> tuple[bool, bytes]:
        """What comes next, and whether it is from standard error. (False, b"") says that the box is gone, at once and
        from then on. Holds a bounded amount: a command that prints faster than this is called waits."""

    async def interrupt(self) -> None:
        """Send SIGUSR1 to the shell, which then kills the inner one."""

    async def limit_hit(self) -> str:
        """The limit of the box that has killed a process since this was last asked: "memory", or ""."""

    def cause(self) -> str:
        """Why the box is gone, in words that follow "the box is gone: "."""


class ShellState(msgspec.Struct, frozen=True):
    """What lasts from command to command: the directory, and shell text that exports the variables."""

    directory: bytes
    exports: bytes

    @classmethod
    def first(cls, directory: str, exports: Mapping[str, str]) -> "ShellState":
        """That of a fresh box."""
        lines = [f"export {name}={shlex.quote(value)}" for name, value in exports.items()]
        return cls(directory.encode(), "\n".join(lines).encode())


class Shell:
    """Drives one shell. Calls never overlap. `home` is the directory where the last one is no more."""

    def __init__(self, channel: Channel, limits: BoxLimits, state: ShellState, home: str = "/") -> None:
        self._channel = channel
        self._limits = limits
        self._token = secrets.token_hex(16)
        self._home = home
        self._state = state
        self._pids = b"all"
        self._control = bytearray()
        self._lives = self._commands = 0
        self._last: Output | None = None
        self._unfinished = False
        self._gone = ""

    @property
    def gone(self) -> bool:
        """Whether every further call raises SandboxDied."""
        return bool(self._gone)

    @property
    def state(self) -> ShellState:
        """After the last command that ended by itself."""
        return self._state

    def died(self) -> SandboxDied:
        """What to raise when something else than the shell finds the box gone."""
        return self._died(self._channel.cause())

    def give_up(self, why: str) -> None:
        """The box has been ended from outside: every later call says why."""
        self._gone = self._gone or why

    async def listening(self, deadline_s: float) -> None:
        """Wait for a sign of life. Whatever a child prints instead is bounded (case X7).

        Raises:
            SandboxDied: it did not come up in time, or said something else; with the beginning of what it said.
        """
        heard = bytearray()
        try:
            async with asyncio.timeout(deadline_s):
                while bytes(self._control[-2:]) != b"H\0":
                    control, data = await self._channel.read()
                    if not data:
                        raise self._died(self._channel.cause() + _said(heard + self._control))
                    (self._control if control else heard).extend(data)
                    if len(heard) + len(self._control) > _MOST_NOISE:
                        raise self._died("it never got ready" + _said(heard + self._control))
        except TimeoutError:
            raise self._died(f"it was not ready within {deadline_s:g} s" + _said(heard + self._control)) from None
        self._control.clear()

    async def begin(self) -> None:
        """Start the inner shell, in the state given. Raises SandboxDied."""
        await self._begin(b"all")

    async def run(self, command: str, timeout_s: float, silence_s: float | None = None) -> CommandResult:
        """See `Sandbox.run`."""
        await self._finish()
        if "\0" in command:
            return CommandResult(_SYNTAX, "syntax error: a command cannot contain the character NUL\n")
        silence_s = self._limits.silence_s if silence_s is None else silence_s
        self._commands += 1
        name = f"c{self._commands}"
        output = self._output(name)
        began = time.monotonic()
        self._unfinished = True
        await self._send(f"run {name}", command.encode("utf-8", errors="replace"))
        code: int | None = None
        try:
            frame = await self._until_ended(output, began + timeout_s, silence_s)
        except _Late as late:
            limit, seconds = str(late), time.monotonic() - began
            await self._interrupt(output)
            await self._begin(self._pids)
        else:
            code, seconds = int(frame[2]), time.monotonic() - began
            limit = await self._channel.limit_hit() if code else ""
            if frame[0] == b"D":
                await self._begin(b"all")
            else:
                self._take(frame)
        self._unfinished = False
        return CommandResult(None if limit else code, output.text(), output.left_out, limit, seconds)

    async def quiet(self) -> ShellState:
        """End every process that commands left behind, and start over in the same state, which is returned.

        Raises:
            SandboxDied: also when a process would not end.
        """
        await self._finish()
        self._unfinished = True
        await self._interrupt(self._output())
        await self._begin(b"")
        self._unfinished = False
        return self._state

    async def _finish(self) -> None:
        """End what a call that was cut off left running."""
        if self._gone:
            raise SandboxDied(f"the box is gone: {self._gone}")
        if self._unfinished:
            await self._interrupt(self._output())
            await self._begin(self._pids)
            self._unfinished = False

    async def _until_ended(self, output: Output, total: float, silence_s: float) -> list[bytes]:
        """The frame that ends the command, once its output has ended too. Raises _Late with the limit's name."""
        frame = self._frame(b"ED", b"")
        quiet = time.monotonic() + silence_s
        while frame is None or not output.ended:
            left = min(total, quiet) - time.monotonic()
            try:
                if left <= 0:
                    raise TimeoutError
                async with asyncio.timeout(left):
                    control, data = await self._read()
            except TimeoutError:
                # The two limits are two (case X9).
                raise _Late("time" if total <= quiet else "silence") from None
            if control:
                frame = frame or self._frame(b"ED", data)
                continue
            output.feed(data)
            quiet = time.monotonic() + silence_s
            if output.left_out > _FLOOD:
                await asyncio.sleep(min(_PACE_S, max(0.0, total - time.monotonic())))
        return frame

    async def _interrupt(self, output: Output) -> None:
        """Have the inner shell killed, and take the rest of what was printed."""
        await self._channel.interrupt()
        await self._answer(b"D", output)

    async def _begin(self, keep: bytes) -> None:
        """Start an inner shell in the last state; of the processes that are there only `keep` go on."""
        self._lives += 1
        name = f"s{self._lives}"
        output = self._output(name)
        home, last = shlex.quote(self._home), shlex.quote(_text(self._state.directory))
        text = self._state.exports + _bytes(f"\ncd -- {last} || cd -- {home} || cd /")
        await self._send(f"start {self._token} {name}", text, keep)
        frame = await self._answer(b"R", output)
        if frame[2] != b"0":
            raise self._died("its processes do not end")
        self._take(frame)

    async def _answer(self, kind: bytes, output: Output) -> list[bytes]:
        """The next frame of one kind, once the output has ended too."""
        frame = self._frame(kind, b"")
        try:
            async with asyncio.timeout(ANSWER_S):
                while frame is None or not output.ended:
                    control, data = await self._read()
                    if control:
                        frame = frame or self._frame(kind, data)
                    else:
                        output.feed(data)
        except TimeoutError:
            raise self._died("its shell does not answer") from None
        return frame

    def _frame(self, kinds: bytes, data: bytes) -> list[bytes] | None:
        """Words of the next answer of one of `kinds`, to what was asked last, directory and exports at their end; None
        while there is none."""
        self._control += data
        while b"\0" in self._control:
            kind = bytes(self._control[:1])
            count = 3 if kind in b"ER" else 1
            fields = self._control.split(b"\0", count)
            if len(fields) <= count:
                break
            self._control = fields[-1]
            words = bytes(fields[0]).split(b" ", 3)
            asked = words[1:2] in ([b"s%d" % self._lives], [b"c%d" % self._commands])
            if kind in kinds and asked and len(words) == 4 and words[2].isdigit():
                return [*words, *map(bytes, fields[1:-1])]
        if len(self._control) > _MOST_CONTROL:
            raise self._died("its shell says what it should not")
        return None

    def _take(self, frame: list[bytes]) -> None:
        self._pids = b" ".join(frame[3].split())
        self._state = ShellState(frame[4], frame[5].removesuffix(b"\n"))

    async def _read(self) -> tuple[bool, bytes]:
        control, data = await self._channel.read()
        if not data:
            raise self._died(self._channel.cause())
        return control, data

    async def _send(self, head: str, text: bytes, tail: bytes = b"") -> None:
        message = b"%b %d %b\n%b\n" % (head.encode(), text.count(b"\n") + 1, tail, text)
        sent = False
        try:
            await self._channel.write(message)
            sent = True
        finally:
            if not sent:
                self._gone = self._gone or "a message to its shell was cut off"

    def _output(self, name: str = "") -> Output:
        """That of the command or the shell `name`, which ends also when the inner shell is gone."""
        output = Output(f"\0{self._token} ".encode(), (name, f"-s{self._lives}"), self._limits.output_kb << 10)
        output.feed(self._last.rest if self._last else b"")
        self._last = output
        return output

    def _died(self, why: str) -> SandboxDied:
        self._gone = self._gone or why
        return SandboxDied(f"the box is gone: {self._gone}")


class _Late(Exception):
    """A command outran the limit that this names."""


def _said(heard: bytes | bytearray) -> str:
    text = bytes(heard[:400]).decode("utf-8", errors="replace").strip()
    return f"; it said: {text}" if text else ""


def _text(data: bytes) -> str:
    return data.decode("utf-8", errors="surrogateescape")


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", errors="surrogateescape")
