"""One long-lived shell over a channel: frames commands, bounds what they print, ends those that outrun a limit.

Every kind of box drives its shell through this, so that all behave alike. What the shell itself is, and what is said to
it, stands in script.py. The order of a box's life: `listening` (the shell is there and has run nothing yet: the moment
to confine it), `begin`, then `run` and `quiet` as often as one likes.

Invariants: a call that is cut off leaves nothing that a later one could take for its own answer; directory and exported
variables are those after the last command that ended by itself; a shell that does not answer, or is gone, raises
SandboxDied from this and every later call (case E13). Opening and closing the channel are left to who made it.
"""

import asyncio
import math
import secrets
import shlex
import time
from collections.abc import Mapping
from typing import Protocol

import msgspec

from headrace.actors.sandboxes import answers
from headrace.actors.sandboxes.answers import DEAD, ENDED, READY, Answer, Answers
from headrace.actors.sandboxes.exports import exported
from headrace.actors.sandboxes.output import Output
from headrace.actors.sandboxes.processes import Process
from headrace.platform.contracts import BoxLimits, CommandResult
from headrace.platform.errors import SandboxDied

ANSWER_S = 10.0
"""How long the shell may take to answer where it runs nothing of the agent's."""
_MOST_NOISE = 1 << 16
_SEND_S = 2.0
_AGAIN_S = 0.5
_FLOOD = 1 << 20
_PACE_S = 0.001
_SYNTAX = 2


class Channel(Protocol):
    """The way to a box's shell: its standard streams, and the few things that only who made it can do.

    All raise SandboxDied when the box is gone, except `read`, `cause` and `limit_hit`. Deadlines are of the loop's
    clock, and raise TimeoutError; here they cost less than a timer for each call.
    """

    async def write(self, data: bytes, until: float = math.inf) -> None:
        """To the shell's standard input, all of it."""

    async def read(self, until: float = math.inf, control: bool = True) -> tuple[bool, bytes]:
        """What comes next, and whether it is from standard error. (False, b"") says that the box is gone, at once and
        from then on. Holds a bounded amount: a command that prints faster than this is called waits. Without `control`
        what comes on standard error alone may be told some hundredths of a second later."""

    async def interrupt(self) -> None:
        """Send SIGUSR1 to the shell, which then kills the inner one."""

    @property
    def sees(self) -> bool:
        """Whether the host sees what runs in the box, and may end it: the same from when the shell listens on."""

    async def below(self) -> frozenset[Process] | None:
        """What runs below the outer shell, as the host sees it; None where it does not."""

    async def end_below(self, but: frozenset[Process]) -> bool:
        """End all of that from the host, except `but`, whatever the box says; whether nothing is left. Called only
        where the host sees it."""

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
        self._answers = Answers()
        self._said = b""  # the exports of `_state`, as the shell says them
        self._lives = self._commands = 0
        self._last: Output | None = None
        self._unfinished = False
        self._still = False  # the inner shell has ended, and no other was asked for
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
        heard, answer = bytearray(), bytearray()
        until = time.monotonic() + deadline_s
        try:
            while bytes(answer[-2:]) != b"H\0":
                control, data = await self._channel.read(until)
                if not data:
                    raise self._died(self._channel.cause() + _said(heard + answer))
                (answer if control else heard).extend(data)
                if len(heard) + len(answer) > _MOST_NOISE:
                    raise self._died("it never got ready" + _said(heard + answer))
        except TimeoutError:
            raise self._died(f"it was not ready within {deadline_s:g} s" + _said(heard + answer)) from None

    async def begin(self) -> None:
        """Start the inner shell, in the state given. Raises SandboxDied."""
        await self._begin(b"all")

    async def run(self, command: str, timeout_s: float, silence_s: float | None = None) -> CommandResult:
        """See `Sandbox.run`."""
        if self._gone or self._unfinished or self._still:
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
        await self._send(answers.run(name, command.encode("utf-8", errors="replace")), max(timeout_s, _SEND_S))
        code: int | None = None
        try:
            answer = await self._until_ended(output, began + timeout_s, silence_s)
        except _Late as late:
            limit, seconds = str(late), time.monotonic() - began
            await self._cut_off(output)
        else:
            code, seconds = answer.code, time.monotonic() - began
            limit = await self._channel.limit_hit() if code else ""
            if answer.kind == DEAD:
                if answer.was_hit:  # by something in the box, which may go on with it
                    await self._ended_all()
                await self._begin(b"all")
            else:
                self._take(answer)
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
        if not self._channel.sees:
            await self._interrupt(output)
            await self._begin(b"")
        else:
            if not await self._channel.end_below(frozenset()):
                raise self._died("its processes do not end")
            await self._answer(DEAD, output)
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

    async def _until_ended(self, output: Output, total: float, silence_s: float) -> Answer:
        """The answer that ends the command, once its output has ended too. Raises _Late with the limit's name."""
        answer = self._next(ENDED + DEAD, b"") if self._answers else None
        quiet = time.monotonic() + silence_s
        while answer is None or not output.ended:
            try:
                # The answer is written before the output ends.
                control, data = await self._channel.read(min(total, quiet), control=output.ended)
            except TimeoutError:
                # The two limits are two (case X9).
                raise _Late("time" if total <= quiet else "silence") from None
            if control:
                answer = answer or self._next(ENDED + DEAD, data)
                continue
            if not data:
                raise self._died(self._channel.cause())
            output.feed(data)
            quiet = time.monotonic() + silence_s
            if output.taken > _FLOOD:
                await asyncio.sleep(min(_PACE_S, max(0.0, total - time.monotonic())))
        return answer

    async def _interrupt(self, output: Output) -> None:
        """Have the inner shell killed, and take the rest of what was printed."""
        await self._channel.interrupt()
        await self._answer(DEAD, output, again=True)

    async def _begin(self, keep: bytes) -> None:
        """Start an inner shell in the last state; of the processes that are there only `keep` go on. Where it ends as
        it begins, something in the box ended it, such as signals to the outer shell: the host ends all that, once."""
        answer = await self._start(keep)
        if answer.kind == DEAD:
            if not await self._ended_all():
                raise self._died("its processes end its shell")
            answer = await self._start(b"")
        if answer.kind == DEAD:
            raise self._died("its shell ends as it begins")
        if answer.number:
            raise self._died("its processes do not end")
        self._take(answer)

    async def _ended_all(self) -> bool:
        """Whether the host could end everything below the outer shell."""
        return self._channel.sees and await self._channel.end_below(frozenset())

    async def _start(self, keep: bytes) -> Answer:
        """See `_begin`; the answer that says how that went."""
        self._lives += 1
        name = f"s{self._lives}"
        output = self._output(name)
        home, last = shlex.quote(self._home), shlex.quote(_text(self._state.directory))
        text = self._state.exports + _bytes(f"\ncd -- {last} || cd -- {home} || cd /")
        await self._send(answers.start(self._token, name, b"host" if self._channel.sees else keep, text), ANSWER_S)
        self._still = False
        return await self._answer(READY + DEAD, output)

    async def _answer(self, kinds: bytes, output: Output, again: bool = False) -> Answer:
        """The next answer of one of the kinds, once the output has ended too. `again`: interrupt as long as none
        comes."""
        answer = self._next(kinds, b"")
        until = time.monotonic() + ANSWER_S
        asked = time.monotonic()
        while answer is None or not output.ended:
            if time.monotonic() >= until:
                raise self._died("its shell does not answer")
            if again and time.monotonic() - asked >= _AGAIN_S:
                await self._channel.interrupt()
                asked = time.monotonic()
            try:
                # What is interrupted may have filled the way of the answer.
                control, data = await self._read(min(until, time.monotonic() + _AGAIN_S), again or output.ended)
            except TimeoutError:
                continue
            if control:
                answer = answer or self._next(kinds, data)
                continue
            output.feed(data)
            if output.taken > _FLOOD:
                await asyncio.sleep(_PACE_S)
        return answer

    def _next(self, kinds: bytes, data: bytes) -> Answer | None:
        """The next answer of one of `kinds`, to what was asked last; None while there is none."""
        try:
            found = self._answers.next(data, kinds, (b"s%d" % self._lives, b"c%d" % self._commands))
        except ValueError:
            raise self._died("its shell says what it should not") from None
        if found is not None:
            self._still = found.kind == DEAD
        return found

    def _take(self, answer: Answer) -> None:
        self._pids = b" ".join(answer.word.split())
        if (answer.directory, answer.exports) != (self._state.directory, self._said):  # most commands change neither
            self._said = answer.exports
            self._state = ShellState(answer.directory, exported(answer.exports))

    async def _read(self, until: float, control: bool = True) -> tuple[bool, bytes]:
        control, data = await self._channel.read(until, control)
        if not data:
            raise self._died(self._channel.cause())
        return control, data

    async def _send(self, message: bytes, limit_s: float) -> None:
        sent = False
        try:
            await self._channel.write(message, time.monotonic() + limit_s)
            sent = True
        except TimeoutError:
            raise self._died("its shell does not read") from None
        finally:
            if not sent:
                self._gone = self._gone or "a message to its shell was cut off"

    def _output(self, name: str = "") -> Output:
        """That of the command or the shell `name`, which ends also when the inner shell is gone."""
        output = Output(f"\0{self._token} ".encode(), (name, f"-s{self._lives}"), self._limits.output_kb << 10)
        if self._last is not None and (rest := self._last.rest):
            output.feed(rest)
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
