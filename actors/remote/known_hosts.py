"""What a pool knows of its hosts, and which of them to try next: decisions without connections, on a clock passed in.

A host is tried for its free places. What it said of itself is believed for a while: hosts come back at the same address
in another version. One that fails is left alone for a moment that doubles each time, so that no session waits for it
while others would take it.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum

from headrace.actors.remote.protocol import Hello

_BELIEVED_S = 10.0
# How many connections to a host of unknown size are begun before it has answered the first.
_UNKNOWN_PLACES = 8
_FIRST_PAUSE_S = {"full": 0.1, "draining": 1.0, "away": 0.25}
_LONGEST_PAUSE_S = {"full": 1.0, "draining": 5.0, "away": 5.0}


class HostState(StrEnum):
    """How a host was when it was last asked."""

    UNKNOWN = "unknown"
    HEALTHY = "healthy"
    FULL = "full"
    DRAINING = "draining"
    AWAY = "away"


@dataclass(slots=True, kw_only=True)
class KnownHost:
    """One host; `version` is None where it is not known. `ours` are this pool's sessions and attempts, `others` those
    of everybody else at `seen_s`."""

    address: str
    version: str | None = None
    state: HostState = HostState.UNKNOWN
    capacity: int = 0
    ours: int = 0
    others: int = 0
    seen_s: float = float("-inf")
    not_before_s: float = float("-inf")
    failures: int = 0
    why: str = "not tried yet"
    has_left: bool = False

    @property
    def is_news(self) -> bool:
        """Its size is not known, and no attempt is under way."""
        return not self.capacity and not self.ours

    def free(self, now: float) -> int:
        """Places that it should have."""
        if not self.capacity:
            return _UNKNOWN_PLACES - self.ours
        others = self.others if now - self.seen_s < _BELIEVED_S else 0
        return self.capacity - self.ours - others

    def greeted(self, hello: Hello, now: float) -> None:
        """It answered: what it said holds. `ours` counts this session already."""
        self.version, self.capacity = hello.version, hello.capacity
        self.others = max(hello.sessions - self.ours, 0)
        self.state, self.why, self.failures, self.seen_s = HostState.HEALTHY, "", 0, now

    def failed(self, state: HostState, why: str, now: float) -> None:
        """It would not, and is left alone for a while; what is gone may come back as another version."""
        self.state, self.why = state, why
        pause_s = min(_FIRST_PAUSE_S[state] * 2**self.failures, _LONGEST_PAUSE_S[state])
        self.failures = min(self.failures + 1, 10)
        self.not_before_s = now + pause_s
        if state is HostState.AWAY:
            self.version, self.capacity = None, 0

    def plays(self, wanted: Collection[str], now: float) -> bool | None:
        """Whether it plays one of the versions `wanted` (any where empty), None where that must be asked."""
        if self.version is None or not (self.ours > 0 or now - self.seen_s < _BELIEVED_S):
            return None
        return not wanted or self.version in wanted


def choose(hosts: Iterable[KnownHost], wanted: Collection[str], now: float) -> KnownHost | None:
    """The host with the most free places among those that may be tried now; before them one that nobody has tried."""
    able = [
        host
        for host in hosts
        if not host.has_left
        and host.not_before_s <= now
        and host.free(now) > 0
        and host.plays(wanted, now) is not False
    ]
    return max(able, key=lambda host: (host.is_news, host.free(now)), default=None)


def is_played_nowhere(hosts: Iterable[KnownHost], version: str, now: float) -> bool:
    """Whether hosts of other versions answer, and none that may be of `version`: waiting for it is of no use (P17)."""
    present = [host for host in hosts if not host.has_left]
    return any(host.plays((version,), now) is False for host in present) and not any(
        host.state in (HostState.UNKNOWN, HostState.HEALTHY, HostState.FULL)
        and host.plays((version,), now) is not False
        for host in present
    )


def complaints(hosts: Iterable[KnownHost], wanted: Collection[str]) -> str:
    """Each host and why it would not, for a message."""
    told = []
    for host in hosts:
        why = host.why
        if not why:
            is_other = wanted and host.version not in wanted
            why = f"plays version {host.version or repr('')}" if is_other else f"all {host.capacity} places are taken"
        told.append(why if host.address in why else f"{host.address}: {why}")
    return "; ".join(told[:8]) + (f"; and {len(told) - 8} more" if len(told) > 8 else "")
