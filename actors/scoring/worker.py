"""The child's side of a scorer's process: reads requests, scores, writes replies. Run with `python -m`.

Frames are a u32 length, little-endian, and msgpack; the first one in is the scorer to build. What the scorer prints
goes to standard error, so that it cannot be taken for a reply.
"""

import ctypes
import math
import os
import signal
import struct
import sys
from typing import Any, BinaryIO

import msgspec

from headrace.actors.frames import described
from headrace.actors.scoring.registry import build_scorer
from headrace.platform.contracts import Scorer
from headrace.platform.errors import ConfigError
from headrace.platform.records.codec import episode_codec
from headrace.platform.records.message import RewardComponent, Task

LENGTH = struct.Struct("<I")
_PR_SET_PDEATHSIG = 1


class Setup(msgspec.Struct, frozen=True):
    """The first frame: which scorer to build, and the parent whose end is the child's."""

    kind: str
    args: dict[str, Any]
    parent_pid: int


class ScoreRequest(msgspec.Struct, frozen=True):
    """A task and an encoded episode."""

    task: Task
    episode: bytes


class ScoreReply(msgspec.Struct, frozen=True):
    """What the scorer returned, or why it did not. The reply to `Setup` has neither when all is well."""

    components: tuple[RewardComponent, ...] = ()
    error: str = ""


def main() -> None:
    """Serve until the parent closes the pipe."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    setup = _receive(sys.stdin.buffer, Setup)
    if setup is None:
        return
    _die_with(setup.parent_pid)
    try:
        scorer = build_scorer(setup.kind, setup.args)
    except (Exception, SystemExit) as error:  # a scorer is foreign code: whatever it raises is an answer
        _send(replies, ScoreReply(error=_explained(error)))
        return
    _send(replies, ScoreReply())
    while (request := _receive(sys.stdin.buffer, ScoreRequest)) is not None:
        _send(replies, _score(scorer, request))


def _score(scorer: Scorer, request: ScoreRequest) -> ScoreReply:
    try:
        components = tuple(scorer.score(request.task, episode_codec.decode(request.episode)))
        for component in components:
            if not isinstance(component, RewardComponent):
                raise TypeError(f"the scorer returned {type(component).__name__}, not RewardComponent")
            if not math.isfinite(component.value):
                raise ValueError(f"the scorer returned the value {component.value}")
    except (Exception, SystemExit) as error:  # the same boundary
        return ScoreReply(error=_explained(error))
    return ScoreReply(components)


def _explained(error: BaseException) -> str:
    """`sums.py:7 in reward: KeyError: 'answer'`. What headrace found wrong names its place itself."""
    text = described(error)
    return text.removeprefix(f"{type(error).__name__}: ") if isinstance(error, ConfigError) else text


def _die_with(parent_pid: int) -> None:
    """End when the parent does, even in the middle of scoring (Linux)."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        sys.exit(0)


def _receive(stream: BinaryIO, kind: type[msgspec.Struct]) -> Any:
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    return msgspec.msgpack.decode(stream.read(LENGTH.unpack(head)[0]), type=kind)


def _send(stream: BinaryIO, reply: ScoreReply) -> None:
    try:
        body = msgspec.msgpack.encode(reply)
    except (TypeError, ValueError, OverflowError) as error:
        body = msgspec.msgpack.encode(ScoreReply(error=f"the scorer's answer cannot be sent: {type(error).__name__}"))
    stream.write(LENGTH.pack(len(body)) + body)
    stream.flush()


if __name__ == "__main__":
    main()
