"""The episodes that the gateway process knows, by scope, and what it has promised each.

A session outlives its connections: a client that lost one opens the same scope again and finds its turns as they were
(P25). It is forgotten a grace period after it was closed, or long after its last connection was lost and the last of
its turns was over (P26). One that was begun in another process, which is gone, is `resumed`: what it has read is
unknown here, so that it counts as having read anything.
"""

import asyncio
import secrets
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from headrace.actors.gateway.decisions.asked import Asked, EpisodeState
from headrace.actors.gateway.policy import Policy
from headrace.actors.gateway.spent import count
from headrace.platform.contracts import Audited, CallVerdict
from headrace.platform.errors import ConfigError
from headrace.platform.hashing import digest_value
from headrace.platform.records.message import ToolCall, ToolSpec
from headrace.platform.records.permissions import Grant

GRACE_S = 60.0
ABSENT_S = 60.0
"""After so long without a connection nobody waits for an approval any more: as long as a client tries to connect."""
ABANDONED_S = 600.0
RESTARTED = "gateway:restarted"
"""The source of what was shown by a process that is gone: it may have been anything."""
RECORD = "record"
"""The source of what a replay showed from the record, which the gateway has not seen."""


@dataclass(slots=True, weakref_slot=True)
class Learned:
    """A policy and the tools under it, shared by all sessions that have them.

    `specs` are by name: the environment's own and, once it is `ready`, those that are mounted here. `load` makes it so.
    """

    policy: Policy
    specs: dict[str, ToolSpec]
    mounted: frozenset[str] = frozenset()
    load: Callable[["Learned"], Coroutine[Any, Any, None]] | None = None
    ready: bool = True
    _loading: "asyncio.Task[None] | None" = None

    async def loaded(self) -> None:
        """Wait until it is ready; after a failure it is tried again. Raises what is wrong with the mounts."""
        if self.ready or self.load is None:
            return
        if self._loading is None or self._loading.done():
            self._loading = asyncio.get_running_loop().create_task(self.load(self))
        await asyncio.shield(self._loading)


@dataclass(slots=True)
class Turn:
    """The calls of one key, and what was answered.

    `running` decides and performs, and whoever asks meanwhile waits for it too; `failure` is how it ended otherwise.
    `verdicts` is None also where the journal has them. `owed` are the allowed calls whose outputs the caller has not
    told yet. `acts`: an effect may have been begun. `until_s` is when whoever asked last stops waiting, on the clock
    of the pipeline. `is_decided`: from here on a session that is closed waits for it.
    """

    calls_hash: bytes
    verdicts: Sequence[CallVerdict] | None = None
    running: "asyncio.Task[Sequence[CallVerdict]] | None" = None
    failure: BaseException | None = None
    owed: Sequence[Asked] = ()
    settling: "asyncio.Task[None] | None" = None
    acts: bool = False
    until_s: float = float("inf")
    is_decided: bool = False


@dataclass(slots=True)
class Session:
    """One episode, one branch of it.

    `calls_before` are those that were decided in a process that is gone, `resumed` says that there may be such;
    `calls_of_before` are the allowed ones of them, by tool, and `began_before_s` is when the first was. `recorded` is
    the number of the last message on calls from a record. `blocked` is why nothing of it is allowed any more. From
    `closing` on nothing is begun; `audited` is set when it is over.
    """

    scope: str
    learned: Learned
    grants: tuple[Grant, ...]
    trusted: tuple[str, ...]
    caller: str = ""
    resumed: bool = False
    calls_before: int = 0
    calls_of_before: dict[str, int] = field(default_factory=dict)
    began_before_s: float = 0.0
    recorded: int = 0
    unseen: list[str] = field(default_factory=list)
    """The sources of what was shown before its first call here."""
    is_written: bool = False
    """The audit has entries of it."""
    calls: int = 0
    turns: dict[str, Turn] = field(default_factory=dict)
    connections: int = 0
    idle_since_s: float = 0.0
    busy_at_s: float = 0.0
    """When it had no connection and was last seen to have a turn under way."""
    blocked: str = ""
    closing: "asyncio.Task[Audited] | None" = None
    audited: Audited | None = None
    begun: EpisodeState | None = None
    """What decisions remember of it; there from its first call on."""

    @property
    def is_busy(self) -> bool:
        """Something of it is under way: a turn, a write of what it gave, or its end."""
        if self.closing is not None and not self.closing.done():
            return True
        for turn in self.turns.values():
            if turn.running is not None or (turn.settling is not None and not turn.settling.done()):
                return True
        return False

    def state(self, now_s: float) -> EpisodeState:
        """What decisions remember of it, begun now if need be. Its tools have to be ready."""
        if self.begun is None:
            self.begun = EpisodeState(
                scope=self.scope,
                policy=self.learned.policy,
                specs=self.learned.specs,
                mounted=self.learned.mounted,
                grants=self.grants,
                began_s=min(now_s, self.began_before_s or now_s),
                trusted=self.trusted,
                credential=secrets.token_urlsafe(24),
                seen=[("", source) for source in ([RESTARTED] if self.calls_before else []) + self.unseen],
            )
            for name, times in self.calls_of_before.items():
                count(self.begun, self.learned.specs.get(name) or ToolSpec(name), times)
            self.begun.calls = max(self.begun.calls, self.calls_before)
        return self.begun

    def take_recorded(self, calls: Sequence[ToolCall]) -> None:
        """Count calls that a replay takes from the record, as if they had been allowed."""
        for call in calls:
            if self.begun is not None:
                count(self.begun, self.learned.specs.get(call.name) or ToolSpec(call.name))
            else:  # its tools may not be ready
                self.calls_of_before[call.name] = self.calls_of_before.get(call.name, 0) + 1
        if self.begun is None:
            self.unseen = [RECORD]
        elif ("", RECORD) not in self.begun.seen:
            self.begun.seen.insert(0, ("", RECORD))


class Sessions:
    """All of them.

    Args:
        clock: monotonic seconds.
        forget: told of each scope that is forgotten.
    """

    def __init__(self, clock: Callable[[], float], forget: Callable[[str], None]) -> None:
        self._clock, self._forget = clock, forget
        self._by_scope: dict[str, Session] = {}

    def __len__(self) -> int:
        return len(self._by_scope)

    def find(self, scope: str) -> Session | None:
        """The session of a scope, None where it is not known here."""
        return self._by_scope.get(scope)

    def add(self, session: Session) -> None:
        """A new one."""
        self._by_scope[session.scope] = session

    def attach(self, session: Session) -> None:
        """A connection speaks for it."""
        session.connections += 1

    def detach(self, session: Session) -> None:
        """A connection does no longer."""
        session.connections -= 1
        session.idle_since_s = self._clock()

    def sweep(self) -> None:
        """Forget those whose time is over, which does not pass while something of them is under way."""
        now = self._clock()
        for session in self._by_scope.values():
            if session.connections == 0 and session.audited is None and session.is_busy:
                session.busy_at_s = now
        for session in [each for each in self._by_scope.values() if self._is_over(each, now)]:
            del self._by_scope[session.scope]
            self._forget(session.scope)

    def unheard(self) -> list[Session]:
        """Those that nobody has spoken for in `ABSENT_S`."""
        until_s = self._clock() - ABSENT_S
        return [each for each in self._by_scope.values() if each.connections == 0 and each.idle_since_s < until_s]

    @staticmethod
    def _is_over(session: Session, now_s: float) -> bool:
        idle_s = now_s - max(session.idle_since_s, session.busy_at_s)
        if session.audited is not None:
            return idle_s > GRACE_S
        return session.connections == 0 and idle_s > ABANDONED_S


def merged(own: Sequence[ToolSpec], mounted: Mapping[str, ToolSpec]) -> dict[str, ToolSpec]:
    """All tools by name.

    Raises:
        ConfigError: two have one name.
    """
    specs: dict[str, ToolSpec] = {}
    for spec in (*own, *mounted.values()):
        if spec.name in specs:
            raise ConfigError(f"two tools are called {spec.name!r}")
        specs[spec.name] = spec
    return specs


def digest_of(policy: Policy, tools: Sequence[ToolSpec]) -> str:
    """What a policy and the tools under it are known by, before and after they were sent: 1 becomes 1.0 on the way."""
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(tools), type=tuple[ToolSpec, ...])
    return digest_value([policy.digest, sent])
