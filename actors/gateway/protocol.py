"""What goes over the gateway's socket: frames of a 4-byte length (big-endian) and a msgpack array.

::

    Hello ─►                    once a connection; the other side answers with its own
    Learn ─►                    a policy with its tools, once a connection and digest; answered by Learned
    Open, Recorded, Decide, Settle, Close ─►      one session; Open and Recorded need no answer

A session is known by a number that the client chooses, and by its scope, which outlives connections: after one was
lost, the client opens the same scope again and repeats what was not answered (P25). Requests carry a number that the
answer repeats; answers come in any order.
"""

import msgspec

from headrace.actors.gateway.policy import Mount, Policy
from headrace.platform.contracts import Audited, CallVerdict, ToolOutput
from headrace.platform.records.message import ToolCall, ToolSpec
from headrace.platform.records.permissions import Grant

PROTOCOL = 2
MAX_FRAME = 64 * 1024 * 1024


class Hello(msgspec.Struct, frozen=True, tag="hello", array_like=True):
    """Who speaks. A client shows the token that lies in the gateway's home."""

    protocol: int = PROTOCOL
    token: str = ""
    build: str = ""


class Mounted(msgspec.Struct, frozen=True, tag="mounted", array_like=True):
    """Make sure that these mounts can be had, and say what tools they are."""

    seq: int
    mounts: tuple[Mount, ...]


class Learn(msgspec.Struct, frozen=True, tag="learn", array_like=True):
    """A policy with the environment's own tools, for sessions to refer to by `digest`."""

    digest: str
    policy: Policy
    tools: tuple[ToolSpec, ...]


class Open(msgspec.Struct, frozen=True, tag="open", array_like=True):
    """A session begins, or goes on after its connection was lost. `digest` is that of a `Learn`.

    The rest is for a process that knows nothing of what was before: `calls` is how many calls were decided, `calls_of`
    how many of each tool were allowed, `recorded` the number of the last `Recorded` among these, and `began_s` when
    the first call was, on the host's monotonic clock (0: none was).
    """

    session: int
    scope: str
    digest: str
    grants: tuple[Grant, ...] = ()
    trusted: tuple[str, ...] = ()
    calls: int = 0
    calls_of: dict[str, int] = {}
    recorded: int = 0
    began_s: float = 0.0


class Recorded(msgspec.Struct, frozen=True, tag="recorded", array_like=True):
    """See `ToolSession.recorded`. `number` counts those of a session from 1, as one may come again."""

    session: int
    number: int
    calls: tuple[ToolCall, ...]


class Decide(msgspec.Struct, frozen=True, tag="decide", array_like=True):
    """See `ToolSession.decide`. After `until_s`, on the host's monotonic clock, nobody waits for the answer any more,
    and no effect is begun; 0 is no limit."""

    seq: int
    session: int
    key: str
    calls: tuple[ToolCall, ...]
    until_s: float = 0.0


class Settle(msgspec.Struct, frozen=True, tag="settle", array_like=True):
    """See `ToolSession.settle`. The outputs are as the model sees them; the client makes them so by the same functions
    (`shown`). A `seq` of 0 wants no answer: the next answer to the session says that it has come."""

    seq: int
    session: int
    key: str
    outputs: tuple[ToolOutput, ...]


class Close(msgspec.Struct, frozen=True, tag="close", array_like=True):
    """See `ToolSession.close`."""

    seq: int
    session: int


class Specs(msgspec.Struct, frozen=True, tag="specs", array_like=True):
    """Answers `Mounted`."""

    seq: int
    tools: tuple[ToolSpec, ...]


class Verdicts(msgspec.Struct, frozen=True, tag="verdicts", array_like=True):
    """Answers `Decide`."""

    seq: int
    verdicts: tuple[CallVerdict, ...]


class Results(msgspec.Struct, frozen=True, tag="results", array_like=True):
    """Answers `Settle`: it is on disk, where it has to be."""

    seq: int


class Closed(msgspec.Struct, frozen=True, tag="closed", array_like=True):
    """Answers `Close`."""

    seq: int
    audited: Audited


class Failed(msgspec.Struct, frozen=True, tag="failed", array_like=True):
    """Answers whatever could not be done. `kind` is "conflict", "in_doubt", "safety", "config" or "away"."""

    seq: int
    kind: str
    message: str


Request = Hello | Mounted | Learn | Open | Recorded | Decide | Settle | Close
Answer = Hello | Specs | Verdicts | Results | Closed | Failed
