"""What the holder of a credential may reach through the proxy, and for how long."""

import base64
import binascii
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from headrace.actors.gateway.decisions.addresses import Place, domain_fits, may_reach, url_problem
from headrace.actors.gateway.decisions.patterns import Patterns

Closing = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Permit:
    """Hosts that fit `domains` and, where that is not empty, `narrowed` too; addresses that are public or lie in
    `addresses`; until `until_s`, in monotonic seconds."""

    domains: Patterns
    addresses: Patterns = ()
    narrowed: Patterns = ()
    until_s: float = math.inf

    def problem(self, place: Place) -> str:
        """Why a place may not be reached, for the model; empty where nothing speaks against it so far."""
        if not place.address:
            for patterns in (self.domains, self.narrowed) if self.narrowed else (self.domains,):
                if not domain_fits(place.host, patterns):
                    return f"{place.host} may not be reached; only {', '.join(patterns[:10]) or 'nothing'} may"
            return ""
        if self.narrowed:
            return f"{place.address} may not be reached; only {', '.join(self.narrowed[:10])} may"
        shown = f"[{place.address}]" if ":" in place.address else place.address
        found = url_problem(f"{place.scheme}://{shown}:{place.port}/", self.domains, self.addresses)
        return found[1] if found is not None else ""

    def may_dial(self, address: str) -> bool:
        """Whether a name may lead to this address."""
        return may_reach(address, self.addresses)


@dataclass(slots=True)
class _Holder:
    """An episode: its permits, by what it says as a user name, and how its connections are closed."""

    permits: dict[str, Permit] = field(default_factory=dict)
    connections: set[Closing] = field(default_factory=set)


class Permits:
    """Those of all episodes, by their credentials.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._holders: dict[str, _Holder] = {}

    def admit(self, credential: str, name: str, permit: Permit) -> None:
        """From now on `name` with `credential` has this permit."""
        self._holders.setdefault(credential, _Holder()).permits[name] = permit

    def revoke(self, credential: str) -> None:
        """The credential is worth nothing any more; its connections are closed. An unknown one is passed over."""
        holder = self._holders.pop(credential, None)
        for close in list(holder.connections) if holder is not None else ():
            close()

    def find(self, authorization: str) -> tuple[str, Permit] | None:
        """Credential and permit of a `Proxy-Authorization` header; None where it is unknown, expired or none."""
        scheme, _, encoded = authorization.partition(" ")
        if scheme.lower() != "basic":
            return None
        try:
            name, _, credential = base64.b64decode(encoded, validate=True).decode().partition(":")
        except (binascii.Error, UnicodeDecodeError):
            return None
        permit = holder.permits.get(name) if (holder := self._holders.get(credential)) is not None else None
        return (credential, permit) if permit is not None and self._clock() < permit.until_s else None

    def left_s(self, permit: Permit) -> float:
        """Seconds until a permit expires."""
        return permit.until_s - self._clock()

    def connected(self, credential: str, close: Closing, at_most: int) -> bool:
        """Whether one more connection may be had; `close` is called when the credential is revoked."""
        holder = self._holders.get(credential)
        if holder is None or len(holder.connections) >= at_most:
            return False
        holder.connections.add(close)
        return True

    def disconnected(self, credential: str, close: Closing) -> None:
        """It is over."""
        if (holder := self._holders.get(credential)) is not None:
            holder.connections.discard(close)
