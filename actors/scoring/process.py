"""A scorer in a process of its own, under a deadline.

Owns the child and whatever it started: brings it up when it is first needed, ends its whole process group when it
outruns its deadline or dies, and starts another for the next episode. Three outcomes are told apart (case E1): the
scorer raised, it timed out, it said something; only the last is a reward. Nothing that comes back is unpickled.
"""

import asyncio
import os
import signal
import sys
import sysconfig
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from headrace.actors.scoring.said import Said
from headrace.actors.scoring.worker import LENGTH, ScoreReply, ScoreRequest, Setup
from headrace.actors.targets import is_target, target_digest, target_label
from headrace.platform.errors import ConfigError
from headrace.platform.hashing import digest_value
from headrace.platform.records.codec import episode_codec
from headrace.platform.records.episode import Episode
from headrace.platform.records.message import RewardComponent, Task
from headrace.platform.records.status import RewardKind

_REPLY_LIMIT = 1 << 20
_END_DEADLINE_S = 2.0
# The paths are arguments and no environment variable, which a reward's own subprocesses would inherit.
_CHILD = (
    "import sys; sys.path[:], sys.argv[1:] = sys.argv[1:], []; from headrace.actors.scoring.worker import main; main()"
)


class _ScorerLost(Exception):
    """The child is gone or spoke nonsense. Never leaves this module."""


class ScorerProcess:
    """Scores one episode at a time; further ones wait their turn, and their deadline begins when it comes.

    Args:
        kind: what `build_scorer` takes: a name, or a target in a file or module.
        args: the scorer's arguments; plain data.
        deadline_s: how long one episode may take.
        start_deadline_s: how long the process may take to come up.
    """

    def __init__(
        self, kind: str, args: Mapping[str, Any], *, deadline_s: float = 10.0, start_deadline_s: float = 60.0
    ) -> None:
        self._kind, self._args = kind, dict(args)
        self.version = _version(kind, self._args)
        self._deadline_s, self._start_deadline_s = deadline_s, start_deadline_s
        self._turn = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._said: Said | None = None
        self._closed = False
        self._was_started = False
        self.restarts = 0

    async def start(self) -> None:
        """Bring the process up now, to find a wrong configuration before the first episode does.

        Raises:
            ConfigError: when the scorer cannot be built, or not in time.
        """
        async with self._turn:
            try:
                await self._ready()
            except _ScorerLost as error:
                raise ConfigError(str(error)) from None

    async def score(self, task: Task, episode: Episode) -> tuple[RewardComponent, ...]:
        """What the scorer says, or one invalid outcome component that says why there is nothing. Never raises for what
        a scorer does."""
        request = ScoreRequest(task, episode_codec.encode(episode))
        async with self._turn:
            try:
                await self._ready()
                reply = await self._exchange(request, self._deadline_s, "scorer")
            except _ScorerLost as error:
                return _invalid(str(error))
        return _invalid(f"scorer raised: {reply.error}") if reply.error else reply.components

    async def close(self) -> None:
        """End the process and what it started; safe to call twice. A score in progress is ended with it, and those that
        wait their turn are not begun."""
        self._closed = True
        await self._kill()

    async def _ready(self) -> None:
        """Have a child that has built its scorer."""
        if self._process is not None and self._process.returncode is None:
            return
        await self._kill()
        if self._is_closed():
            raise _ScorerLost("scorer is closed")
        await self._spawn()
        if self._is_closed():  # meanwhile
            await self._kill()
            raise _ScorerLost("scorer is closed")
        setup = Setup(self._kind, self._args, os.getpid())
        reply = await self._exchange(setup, self._start_deadline_s, "start of the scorer")
        if reply.error:
            await self._kill()
            raise _ScorerLost(f"scorer cannot be built: {reply.error}")

    async def _spawn(self) -> None:
        self.restarts += self._was_started
        self._was_started = True
        self._said = Said(target_label(self._kind) if is_target(self._kind) else self._kind)
        errors = await self._said.open()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-u", "-c", _CHILD, *_child_path()),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
        except BaseException:
            os.close(errors)
            await self._kill()
            raise
        os.close(errors)

    def _is_closed(self) -> bool:
        return self._closed

    async def _exchange(self, frame: msgspec.Struct, deadline_s: float, what: str) -> ScoreReply:
        """Send a frame and read its reply. Whatever goes wrong ends the child: a late reply must not be read as the
        answer to the next request."""
        process = self._process
        assert process is not None
        try:
            async with asyncio.timeout(deadline_s):
                return await _converse(process, frame)
        except TimeoutError:
            await self._kill()
            raise _ScorerLost(f"{what} timed out after {deadline_s:g} s") from None
        except (asyncio.IncompleteReadError, ConnectionError):
            raise _ScorerLost(await self._last_words(process, what)) from None
        except msgspec.DecodeError as error:
            await self._kill()
            raise _ScorerLost(f"{what} sent what is not a reply: {error}") from None
        except asyncio.CancelledError:
            await self._kill()
            raise

    async def _last_words(self, process: asyncio.subprocess.Process, what: str) -> str:
        """How the child died, and the tail of what it printed."""
        with suppress(TimeoutError):  # its own exit code, rather than that of our kill
            async with asyncio.timeout(_END_DEADLINE_S):
                await process.wait()
        said = self._said
        await self._kill()
        tail = said.tail() if said is not None else ""
        return f"{what} died with exit code {process.returncode}" + (f": {tail}" if tail else "")

    async def _kill(self) -> None:
        """End the child with all that it started, once: later its number may be another's."""
        process, self._process = self._process, None
        said, self._said = self._said, None
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(TimeoutError):
                async with asyncio.timeout(_END_DEADLINE_S):
                    await process.wait()
        if said is not None:
            await said.close(_END_DEADLINE_S)


async def _converse(process: asyncio.subprocess.Process, frame: msgspec.Struct) -> ScoreReply:
    assert process.stdin is not None
    assert process.stdout is not None
    body = msgspec.msgpack.encode(frame)
    process.stdin.write(LENGTH.pack(len(body)) + body)
    await process.stdin.drain()
    (length,) = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
    if length > _REPLY_LIMIT:
        raise msgspec.DecodeError(f"a reply of {length} bytes")
    return msgspec.msgpack.decode(await process.stdout.readexactly(length), type=ScoreReply)


def _child_path() -> list[str]:
    """Where the child imports from: as here, but from Python's own library first, so that no `random.py` of the
    current folder hides what the child itself needs."""
    own = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    own |= {str(Path(path) / "lib-dynload") for path in own}
    paths = [str(Path(path).absolute()) if Path(path).is_dir() else path for path in sys.path]
    return sorted(paths, key=lambda path: path not in own)


def _version(kind: str, args: Mapping[str, Any]) -> str:
    """Changes with the arguments, and with the file that a target lies in; not with the folder of that file."""
    if not is_target(kind):
        return f"{kind}-{digest_value(args)[:12]}"
    return f"{target_label(kind)}-{digest_value([args, target_digest(kind)])[:12]}"


def _invalid(evidence: str) -> tuple[RewardComponent, ...]:
    return (RewardComponent(RewardKind.OUTCOME, valid=False, evidence=evidence),)
