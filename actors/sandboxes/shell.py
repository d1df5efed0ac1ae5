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

from headrace.actors.sandboxes.exports import exported
from headrace.actors.sandboxes.output import Output
from headrace.actors.sandboxes.processes import Process
from headrace.platform.contracts import BoxLimits, CommandResult
from headrace.platform.errors import SandboxDied

ANSWER_S = 10.0
"""How long the shell may take to answer where it runs nothing of the agent's."""
_MOST_CONTROL = 1 << 20
_MOST_NOISE = 1 << 16
_MOST_FRAMES = 256
_SEND_S = 2.0
_AGAIN_S = 0.5
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

    async def below(self) -> frozenset[Process] | None:
        """What runs below the outer shell, as the host sees it; None where it cannot."""

    async def end_below(self, but: frozenset[Process]) -> bool:
        """End all of that from the host, except `but`, whatever the box says; whether nothing is left. Called only
        where `below` can see it."""

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
        self._still = False  # the inner shell has ended, and no other was asked for
        self._noise = 0
        self._before: frozenset[Process] | None = None
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
        self._before = await self._channel.below()
        began = time.monotonic()
        self._unfinished = True
        await self._send(f"run {name}", command.encode("utf-8", errors="replace"), max(timeout_s, _SEND_S))
        code: int | None = None
        try:
            frame = await self._until_ended(output, began + timeout_s, silence_s)
        except _Late as late:
            limit, seconds = str(late), time.monotonic() - began
            await self._cut_off(output)
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
        """End every process but the outer shell, the inner one too, until `resume` or the next command. The state.

        The host ends them, so that nothing in the box can make it seem so. Where the host cannot see them, the outer
        shell ends them, and a new inner one is there at once.

        Raises:
            SandboxDied: also when a process would not end.
        """
        await self._finish()
        self._unfinished = True
        output = self._output()
        if await self._channel.below() is None:
            await self._interrupt(output)
            await self._begin(b"")
        else:
            if not await self._channel.end_below(frozenset()):
                raise self._died("its processes do not end")
            await self._answer(b"D", output)
        self._unfinished = False
        return self._state

    async def resume(self) -> None:
        """Begin a new inner shell after `quiet`, where there is none. Raises SandboxDied."""
        if self._still and not self._gone:
            self._unfinished = True
            await self._begin(b"")
            self._unfinished = False

    async def _finish(self) -> None:
        """End what a call that was cut off left running."""
        if self._gone:
            raise SandboxDied(f"the box is gone: {self._gone}")
        if self._unfinished:
            await self._cut_off(self._output())
            self._unfinished = False
        await self.resume()

    async def _cut_off(self, output: Output) -> None:
        """End the command and all that it began; what was there before goes on."""
        if not self._still:
            await self._interrupt(output)
        if self._before is not None and not await self._channel.end_below(self._before):
            raise self._died("its processes do not end")
        await self._begin(self._pids)

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
            if output.taken > _FLOOD:
                await asyncio.sleep(min(_PACE_S, max(0.0, total - time.monotonic())))
        return frame

    async def _interrupt(self, output: Output) -> None:
        """Have the inner shell killed, and take the rest of what was printed."""
        await self._channel.interrupt()
        await self._answer(b"D", output, again=True)

    async def _begin(self, keep: bytes) -> None:
        """Start an inner shell in the last state; of the processes that are there only `keep` go on."""
        self._lives += 1
        name = f"s{self._lives}"
        output = self._output(name)
        home, last = shlex.quote(self._home), shlex.quote(_text(self._state.directory))
        text = self._state.exports + _bytes(f"\ncd -- {last} || cd -- {home} || cd /")
        await self._send(f"start {self._token} {name}", text, ANSWER_S, keep)
        self._still = False
        frame = await self._answer(b"R", output)
        if frame[2] != b"0":
            raise self._died("its processes do not end")
        self._take(frame)

    async def _answer(self, kind: bytes, output: Output, again: bool = False) -> list[bytes]:
        """The next frame of one kind, once the output has ended too. `again`: interrupt as long as it does not come."""
        frame = self._frame(kind, b"")
        until = time.monotonic() + ANSWER_S
        asked = time.monotonic()
        while frame is None or not output.ended:
            if time.monotonic() >= until:
                raise self._died("its shell does not answer")
            if again and time.monotonic() - asked >= _AGAIN_S:
                await self._channel.interrupt()
                asked = time.monotonic()
            try:
                async with asyncio.timeout(min(_AGAIN_S, max(0.0, until - time.monotonic()))):
                    control, data = await self._read()
            except TimeoutError:
                continue
            if control:
                frame = frame or self._frame(kind, data)
                continue
            output.feed(data)
            if output.taken > _FLOOD:
                await asyncio.sleep(_PACE_S)
        return frame

    def _frame(self, kinds: bytes, data: bytes) -> list[bytes] | None:
        """Words of the next answer of one of `kinds`, to what was asked last, directory and exports at their end; None
        while there is none."""
        self._control += data
        start = 0
        found: list[bytes] | None = None
        while found is None and self._noise <= _MOST_FRAMES and (fields := self._fields(start)):
            start += sum(map(len, fields)) + len(fields)
            self._noise += 1
            words = fields[0].split(b" ", 3)
            asked = words[1:2] in ([b"s%d" % self._lives], [b"c%d" % self._commands])
            if fields[0][:1] in kinds and asked and len(words) == 4 and _is_code(words[2]):
                found = [*words, *fields[1:]]
                self._still = fields[0][:1] == b"D"
                self._noise = 0
        del self._control[:start]
        if self._noise > _MOST_FRAMES or len(self._control) > _MOST_CONTROL:
            raise self._died("its shell says what it should not")
        return found

    def _fields(self, start: int) -> list[bytes]:
        """Those of the answer that begins there; none while it is not whole."""
        fields: list[bytes] = []
        for _ in range(3 if bytes(self._control[start : start + 1]) in (b"E", b"R") else 1):
            end = self._control.find(b"\0", start)
            if end < 0:
                return []
            fields.append(bytes(self._control[start:end]))
            start = end + 1
        return fields

    def _take(self, frame: list[bytes]) -> None:
        self._pids = b" ".join(frame[3].split())
        self._state = ShellState(frame[4], exported(frame[5]))

    async def _read(self) -> tuple[bool, bytes]:
        control, data = await self._channel.read()
        if not data:
            raise self._died(self._channel.cause())
        return control, data

    async def _send(self, head: str, text: bytes, limit_s: float, tail: bytes = b"") -> None:
        message = b"%b %d %b\n%b\n" % (head.encode(), text.count(b"\n") + 1, tail, text)
        sent = False
        try:
            async with asyncio.timeout(limit_s):
                await self._channel.write(message)
            sent = True
        except TimeoutError:
            raise self._died("its shell does not read") from None
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


def _is_code(word: bytes) -> bool:
    return len(word) <= 3 and word.isdigit() and int(word) <= 255


def _said(heard: bytes | bytearray) -> str:
    text = bytes(heard[:400]).decode("utf-8", errors="replace").strip()
    return f"; it said: {text}" if text else ""


def _text(data: bytes) -> str:
    return data.decode("utf-8", errors="surrogateescape")


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", errors="surrogateescape")
