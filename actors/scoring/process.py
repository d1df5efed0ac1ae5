"""A scorer in a process of its own, under a deadline.

Owns the child: starts it when it is first needed, ends it when it outruns its deadline or dies, and starts another for
the next episode. Three outcomes are told apart (case E1): the scorer raised, it timed out, it said something; only the
last is a reward. Nothing that comes back is unpickled.
"""

import asyncio
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from headrace.actors.scoring.worker import LENGTH, ScoreReply, ScoreRequest, Setup
from headrace.actors.targets import is_target, target_digest, target_label
from headrace.platform.errors import ConfigError
from headrace.platform.hashing import digest_value
from headrace.platform.records.codec import episode_codec
from headrace.platform.records.episode import Episode
from headrace.platform.records.message import RewardComponent, Task
from headrace.platform.records.status import RewardKind

_REPLY_LIMIT = 1 << 20


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
        """End the process; safe to call twice. A score in progress is ended with it."""
        await self._kill()

    async def _ready(self) -> None:
        """Have a child that has built its scorer."""
        if self._process is not None and self._process.returncode is None:
            return
        if self._process is not None:
            self.restarts += 1
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "headrace.actors.scoring.worker",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path)},
        )
        setup = Setup(self._kind, self._args, os.getpid())
        reply = await self._exchange(setup, self._start_deadline_s, "start of the scorer")
        if reply.error:
            await self._kill()
            raise _ScorerLost(f"scorer cannot be built: {reply.error}")

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
            await self._kill()
            raise _ScorerLost(f"{what} died with exit code {process.returncode}") from None
        except msgspec.DecodeError as error:
            await self._kill()
            raise _ScorerLost(f"{what} sent what is not a reply: {error}") from None
        except asyncio.CancelledError:
            await self._kill()
            raise

    async def _kill(self) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.kill()
        await process.wait()


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


def _version(kind: str, args: Mapping[str, Any]) -> str:
    """Changes with the arguments, and with the file that a target lies in; not with the folder of that file."""
    if not is_target(kind):
        return f"{kind}-{digest_value(args)[:12]}"
    return f"{target_label(kind)}-{digest_value([args, target_digest(kind)])[:12]}"


def _invalid(evidence: str) -> tuple[RewardComponent, ...]:
    return (RewardComponent(RewardKind.OUTCOME, valid=False, evidence=evidence),)
