"""What the frames say: a msgpack array of messages, each of them a small array with its arrays as raw bytes.

Owns the translation between records and messages and between errors and codes. The layouts belong to the protocol
version: a change to any of them raises `PROTOCOL_NEWEST`.
"""

import functools
from enum import StrEnum

import msgspec
import numpy as np

from headrace.platform.errors import DeadlineExceeded, EngineDead, EngineError, VersionUnavailable
from headrace.platform.records.generation import Generation, GenerationRequest, SamplingParams
from headrace.platform.records.status import FinishReason, UpdateMode
from headrace.platform.records.versions import VersionSpan

PROTOCOL_OLDEST = 2
PROTOCOL_NEWEST = 2

_I32 = np.dtype("<i4")
_F32 = np.dtype("<f4")
_encode = msgspec.msgpack.Encoder().encode


_REPLY_TAG = 1


class ErrorCode(StrEnum):
    """The errors that cross the door as themselves."""

    VERSION_UNAVAILABLE = "version_unavailable"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    ENGINE_DEAD = "engine_dead"
    ENGINE_ERROR = "engine_error"


class Ask(msgspec.Struct, array_like=True, tag=1, gc=False):
    """A GenerationRequest. `number` names the answer on this connection; `key` the request on all of them (P24)."""

    number: int
    key: str
    session: str
    token_ids: bytes
    version: int
    seed: int
    sampling: SamplingParams
    deadline_s: float
    update_mode: UpdateMode


class Cancel(msgspec.Struct, array_like=True, tag=2, gc=False):
    """Nobody waits for this request any more."""

    key: str


class Release(msgspec.Struct, array_like=True, tag=3, gc=False):
    """The episode samples no further (P19)."""

    session: str


class Acknowledge(msgspec.Struct, array_like=True, tag=4, gc=False):
    """The results of these requests have arrived and need not be kept (P24)."""

    keys: tuple[str, ...]


class Farewell(msgspec.Struct, array_like=True, tag=5, gc=False):
    """The client ends here: it will not come back for what is open."""


class Reply(msgspec.Struct, array_like=True, tag=_REPLY_TAG, gc=False):
    """A Generation, as it is read; `encode_generation` writes the same fields in the same order."""

    number: int
    token_ids: bytes
    logprobs: bytes
    finish_reason: FinishReason
    version_spans: msgspec.Raw
    replica: str
    engine_build: str


class Failure(msgspec.Struct, array_like=True, tag=2, gc=False):
    """A request ended with an error."""

    number: int
    code: ErrorCode
    message: str


class Versions(msgspec.Struct, array_like=True, tag=3, gc=False):
    """The versions that can be asked for from now on, oldest first; while `draining`, by sessions that are there."""

    numbers: tuple[int, ...]
    draining: bool


class Goodbye(msgspec.Struct, array_like=True, tag=4, gc=False):
    """The replica ends here: there is nobody to come back to."""

    why: str


_decode_spans = msgspec.msgpack.Decoder(tuple[VersionSpan, ...]).decode
FromClient = Ask | Cancel | Release | Acknowledge | Farewell
FromServer = Reply | Failure | Versions | Goodbye
_to_server = msgspec.msgpack.Decoder[list[FromClient]](list[FromClient])
_to_client = msgspec.msgpack.Decoder[list[FromServer]](list[FromServer])
decode_for_server = _to_server.decode
"""A frame of what a client says. Raises msgspec.DecodeError or ValueError when it is none."""
decode_for_client = _to_client.decode
"""A frame of what a server says. Raises msgspec.DecodeError or ValueError when it is none."""


def encode(message: msgspec.Struct) -> bytes:
    """`message` as it goes into a frame."""
    return _encode(message)


def encode_request(number: int, request: GenerationRequest, deadline_s: float) -> bytes:
    """The message that asks for `request`, of whose deadline `deadline_s` are left. Raises TypeError unless its token
    ids are i32."""
    ids = request.token_ids
    if ids.dtype != _I32:
        raise TypeError(f"token ids are i32, not {ids.dtype}")
    return _encode(
        Ask(
            number,
            request.key,
            request.session,
            ids.tobytes(),
            request.version,
            request.seed,
            request.sampling,
            deadline_s,
            request.update_mode,
        )
    )


def request_of(ask: Ask) -> GenerationRequest:
    """The record in `ask`; its token ids are a read-only view. Raises ValueError when they are cut short."""
    ids = np.frombuffer(ask.token_ids, _I32)
    return GenerationRequest(
        ask.key, ask.session, ids, ask.version, ask.seed, ask.sampling, ask.deadline_s, ask.update_mode
    )


def encode_generation(number: int, generation: Generation) -> bytes:
    """The message that answers request `number`. Raises TypeError unless ids are i32 and logprobs f32."""
    ids, logprobs = generation.token_ids, generation.logprobs
    if ids.dtype != _I32 or logprobs.dtype != _F32:
        raise TypeError(f"token ids are i32 and logprobs f32, not {ids.dtype} and {logprobs.dtype}")
    return _encode(
        (
            _REPLY_TAG,
            number,
            ids.tobytes(),
            logprobs.tobytes(),
            generation.finish_reason,
            generation.version_spans,
            generation.replica,
            generation.engine_build,
        )
    )


def generation_of(reply: Reply) -> Generation:
    """The record in `reply`; its arrays are read-only views. Raises ValueError when they are cut short."""
    ids = np.frombuffer(reply.token_ids, _I32)
    logprobs = np.frombuffer(reply.logprobs, _F32)
    spans = _spans_of(bytes(reply.version_spans))
    return Generation(ids, logprobs, reply.finish_reason, spans, reply.replica, reply.engine_build)


@functools.lru_cache(maxsize=1024)
def _spans_of(data: bytes) -> tuple[VersionSpan, ...]:
    """Turns of one length under one version share their spans, which are immutable: one object serves them all."""
    return _decode_spans(data)


def failure_of(number: int, error: Exception) -> Failure:
    """`error` on its way to the client. What is not an engine's own error becomes an EngineError that names it."""
    match error:
        case VersionUnavailable():
            return Failure(number, ErrorCode.VERSION_UNAVAILABLE, str(error))
        case DeadlineExceeded():
            return Failure(number, ErrorCode.DEADLINE_EXCEEDED, str(error))
        case EngineDead():
            return Failure(number, ErrorCode.ENGINE_DEAD, str(error))
        case EngineError():
            return Failure(number, ErrorCode.ENGINE_ERROR, str(error))
    return Failure(number, ErrorCode.ENGINE_ERROR, f"{type(error).__name__}: {error}")


def error_of(failure: Failure) -> EngineError | DeadlineExceeded:
    """The error that the client raises for `failure`."""
    return _ERROR_OF_CODE[failure.code](failure.message)


_ERROR_OF_CODE: dict[ErrorCode, type[EngineError] | type[DeadlineExceeded]] = {
    ErrorCode.VERSION_UNAVAILABLE: VersionUnavailable,
    ErrorCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    ErrorCode.ENGINE_DEAD: EngineDead,
    ErrorCode.ENGINE_ERROR: EngineError,
}
