"""What environment hosts and their clients say to each other: JSON objects in WebSocket text frames at `/ws`.

The envelope is that of OpenEnv 0.3 (`openenv.core.env_server.types`: WSResetMessage, WSStepMessage, WSStateMessage,
WSCloseMessage; WSObservationResponse, WSStateResponse, WSErrorResponse), so that its clients can play on our hosts::

    {"type": "reset", "data": {"seed": 7}}             -> {"type": "observation", "data": {"observation": {…},
    {"type": "step", "data": {"message": "v31"}}               "reward": null or number, "done": false}}
    {"type": "state"}                                  -> {"type": "state", "data": {"episode_id": …, "step_count": …}}
    {"type": "close"}                                  -> the connection ends
    anything that goes wrong                           -> {"type": "error", "data": {"message": …, "code": …}}

headrace's own client says more: `hello` is answered with a `Hello`, `reset` carries a whole Task and `step` a whole
Message and its key. An `observation` is always a whole Observation or StepResult: hashes, metadata and statuses survive
(case X16). An error of the environment carries a `Fault`, from which the client makes the same error again.

Owns the shapes and the codes; connections belong to `link.py` and `host_session.py`.
"""

import json
from enum import StrEnum
from typing import Any

import msgspec

from headrace.actors.frames import described, message_of, own_frame
from headrace.actors.text import well_formed_text
from headrace.platform.errors import (
    DeadlineExceeded,
    EnvironmentFault,
    HeadraceError,
    HostAway,
    InfrastructureFault,
    SandboxDied,
)
from headrace.platform.records.episode import Provenance
from headrace.platform.records.message import Message, Task
from headrace.platform.records.status import FaultOwner

PROTOCOL = 1
"""The number that both sides name in the handshake; others are refused."""
MAX_MESSAGE = 32 * 2**20
"""Bytes of one message, either way."""
MOST_TEXT = 4000
"""Characters of an error that travel."""


class Code(StrEnum):
    """Codes of errors: OpenEnv's, and in lower case those that it does not know."""

    INVALID_JSON = "INVALID_JSON"
    UNKNOWN_TYPE = "UNKNOWN_TYPE"
    VALIDATION_ERROR = "VALIDATION_ERROR"
    EXECUTION_ERROR = "EXECUTION_ERROR"
    CAPACITY_REACHED = "CAPACITY_REACHED"
    SESSION_ERROR = "SESSION_ERROR"
    FULL = "full"
    DRAINING = "draining"
    CANCELLED = "cancelled"
    IDLE = "idle"

    @property
    def refuses(self) -> bool:
        """Nothing has begun: another host may take the session."""
        return self in (Code.FULL, Code.DRAINING, Code.CAPACITY_REACHED)

    @property
    def ends(self) -> bool:
        """The host ends a session that had begun; a new attempt may be played elsewhere."""
        return self in (Code.CANCELLED, Code.IDLE, Code.SESSION_ERROR)


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """What a host says of itself. `sessions` are those that it plays now, this one included."""

    environment: str
    version: str
    target: str = ""
    image_digest: str = ""
    protocol: int = PROTOCOL
    capacity: int = 1
    sessions: int = 0


class Said(msgspec.Struct):
    """Any message of either side."""

    type: str
    data: dict[str, Any] = {}


class ResetData(msgspec.Struct, kw_only=True):
    """What headrace's client sends to begin. `deadline_s` is how long it waits, 0 for as long as the host likes."""

    task: Task
    seed: int
    deadline_s: float = 0.0


class StepData(msgspec.Struct, kw_only=True):
    """What headrace's client sends to act."""

    message: Message
    key: str
    deadline_s: float = 0.0


class FaultKind(StrEnum):
    """Which error it was on the host."""

    ENVIRONMENT = "environment"
    DEADLINE = "deadline"
    SANDBOX_DIED = "sandbox_died"
    HOST_AWAY = "host_away"
    INFRASTRUCTURE = "infrastructure"


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """An error of the environment as it travels: enough to make the same one again, with the same owner."""

    kind: FaultKind
    transient: bool
    owner: FaultOwner
    text: str


def encode(said: Any) -> bytes:
    """A message as JSON. A lone surrogate, which is no UTF-8, travels as an escape."""
    try:
        return msgspec.json.encode(said)
    except UnicodeEncodeError:
        return json.dumps(msgspec.to_builtins(said)).encode()


def decode(data: bytes | str) -> Said:
    """A message from JSON. Raises ValueError for anything else."""
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, RecursionError):
        try:
            return msgspec.convert(json.loads(data), Said)
        except RecursionError:
            raise ValueError("it is nested too deeply") from None


def fault_of(error: BaseException) -> Fault:
    """What to send for an error of an environment. The text names the file and line of whoever wrote it."""
    if isinstance(error, TimeoutError):
        kind, transient = FaultKind.DEADLINE, True
    elif isinstance(error, EnvironmentFault):
        kinds = ((SandboxDied, FaultKind.SANDBOX_DIED), (HostAway, FaultKind.HOST_AWAY))
        others = FaultKind.INFRASTRUCTURE if isinstance(error, InfrastructureFault) else FaultKind.ENVIRONMENT
        kind = next((kind for cls, kind in kinds if isinstance(error, cls)), others)
        transient = error.transient
    else:
        kind, transient = FaultKind.ENVIRONMENT, False
    infrastructure = isinstance(error, InfrastructureFault)
    return Fault(
        kind=kind,
        transient=transient,
        owner=FaultOwner.INFRASTRUCTURE if infrastructure else FaultOwner.ENVIRONMENT,
        text=well_formed_text(_text(error))[:MOST_TEXT],
    )


def error_of(fault: Fault) -> HeadraceError:
    """The error that `fault_of` was given, or the one that stands for it."""
    match fault.kind:
        case FaultKind.DEADLINE:
            return DeadlineExceeded(fault.text)
        case FaultKind.SANDBOX_DIED:
            return SandboxDied(fault.text)
        case FaultKind.HOST_AWAY:
            return HostAway(fault.text)
        case FaultKind.INFRASTRUCTURE:
            return InfrastructureFault(fault.text)
        case FaultKind.ENVIRONMENT:
            return EnvironmentFault(fault.text, fault.transient)


def news_of(provenance: Provenance, told: Provenance) -> Provenance | None:
    """What to tell of a world's provenance when `told` is known, None for nothing: of the cassette only the steps that
    are new or have grown."""
    if provenance == told:
        return None
    external = {step: asked for step, asked in provenance.external.items() if told.external.get(step) != asked}
    return msgspec.structs.replace(provenance, external=external)


def with_news(known: Provenance, news: Provenance) -> Provenance:
    """The provenance after `news_of`."""
    return msgspec.structs.replace(news, external={**known.external, **news.external})


_decoder = msgspec.json.Decoder(Said)


def _text(error: BaseException) -> str:
    if not isinstance(error, EnvironmentFault | DeadlineExceeded):
        return described(error)
    where = own_frame(error)
    return f"{where}: {message_of(error)}" if where else message_of(error)
