"""The child's side of a scorer's process: reads requests, scores, writes replies.

Frames are a u32 length, little-endian, and msgpack; the first one in is the scorer to build. Requests and replies have
file descriptors of their own: what the scorer prints goes to standard error and cannot be taken for a reply, and its
standard input is empty, so that neither it nor its subprocesses can read a request. When the parent ends, so does this
process, and so does whatever it started and left in its process group.
"""

import ctypes
import os
import select
import signal
import struct
import sys
from typing import Any, BinaryIO

import msgspec

from headrace.actors.frames import defined_at, described
from headrace.actors.scoring.registry import build_scorer
from headrace.actors.scoring.values import named, plain_reward
from headrace.actors.text import well_formed_text
from headrace.platform.contracts import Scorer
from headrace.platform.errors import ConfigError
from headrace.platform.records.codec import episode_codec
from headrace.platform.records.message import RewardComponent, Task

LENGTH = struct.Struct("<I")
_PR_SET_PDEATHSIG = 1
_ERROR_CHARS = 4000


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
    requests, replies = _take_pipes()
    _leave_guard(requests.fileno(), replies.fileno())
    setup = _receive(requests, Setup)
    if setup is None:
        return
    _die_with(setup.parent_pid)
    try:
        scorer = build_scorer(setup.kind, setup.args)
    except (Exception, SystemExit) as error:  # a scorer is foreign code: whatever it raises is an answer
        _send(replies, ScoreReply(error=_explained(error)))
        return
    _send(replies, ScoreReply())
    while (request := _receive(requests, ScoreRequest)) is not None:
        _send(replies, _score(scorer, request))


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Requests and replies, out of reach of code that knows only the standard streams."""
    requests, replies = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return os.fdopen(requests, "rb"), os.fdopen(replies, "wb")


def _leave_guard(requests: int, replies: int) -> None:
    """Fork a process that ends this one's group, itself included, once the parent no longer holds its end of
    `requests`. A killed parent cannot do so, and this process may be killed with it. It is no child of this process,
    so that code that waits for all its children is not kept waiting."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    if os.fork():
        os._exit(0)
    for descriptor in (0, 1, 2, replies):
        os.close(descriptor)
    hung_up = select.poll()
    hung_up.register(requests, 0)
    hung_up.poll()
    os.killpg(0, signal.SIGKILL)


def _score(scorer: Scorer, request: ScoreRequest) -> ScoreReply:
    try:
        answer: Any = scorer.score(request.task, episode_codec.decode(request.episode))
        return ScoreReply(_checked(answer, defined_at(scorer.score)))
    except (Exception, SystemExit) as error:  # the same boundary
        return ScoreReply(error=_explained(error))


def _checked(answer: Any, where: str) -> tuple[RewardComponent, ...]:
    if not isinstance(answer, tuple | list):
        raise TypeError(f"{where}: score returned {named(answer)}; expected a sequence of headrace.RewardComponent")
    try:
        return tuple(map(plain_reward, answer))
    except (TypeError, ValueError) as error:
        raise type(error)(f"{where}: score returned {error}") from None


def _explained(error: BaseException) -> str:
    """`sums.py:7 in reward: KeyError: 'answer'`. What headrace found wrong names its place itself."""
    text = described(error)
    if isinstance(error, ConfigError):
        text = text.removeprefix(f"{type(error).__name__}: ")
    return well_formed_text(text[:_ERROR_CHARS])


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
