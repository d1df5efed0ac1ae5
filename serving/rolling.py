"""Which replica takes up which version next, where a replica holds one version and sticky sessions use it (P22).

Pure: whoever conducts asks the replicas, decides here, and tells one replica. Invariants: at most one replica rolls at
a time; the one with the fewest sessions first; straight to the newest committed version, whatever lies between; at
least one stays open, unless draining is allowed; a replica that is held to a version for an evaluation keeps it, and
one replica is enough to hold it.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaState:
    """One replica that answers: what it holds, oldest first, how many sessions use it, and what it is held to."""

    name: str
    versions: tuple[int, ...]
    sessions: int
    is_draining: bool = False
    held: frozenset[int] = frozenset()

    @property
    def newest(self) -> int:
        """The newest version that it holds, -1 while it is empty."""
        return max(self.versions, default=-1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Roll:
    """Replica `replica` is to hold `version`; to go on holding it, where `hold` is set."""

    replica: str
    version: int
    hold: bool = False


def next_roll(
    replicas: Sequence[ReplicaState],
    *,
    newest: int,
    wanted: Collection[int] = (),
    drain_allowed: bool,
    follows: bool = True,
) -> Roll | str:
    """What is to be told to a replica now, or why nothing is.

    Args:
        replicas: those that answer and stay. One that is empty takes up the newest version by itself.
        newest: the newest committed version, -1 for none.
        wanted: versions that an evaluation needs.
        drain_allowed: the last open replica may drain.
        follows: replicas wait to be told of newer versions, as they do under sticky.
    """
    for version in sorted(wanted):
        if any(version in replica.held for replica in replicas):
            continue
        holders = [replica for replica in replicas if version in replica.versions and not replica.is_draining]
        if holders:
            return Roll(replica=min(holders, key=_work).name, version=version, hold=True)
        return _roll(replicas, [each for each in replicas if each.versions], version, drain_allowed, hold=True)
    behind = [replica for replica in replicas if 0 <= replica.newest < newest]
    if not follows or not behind:
        return "every replica holds what it should"
    return _roll(replicas, behind, newest, drain_allowed, hold=False)


def _roll(
    replicas: Sequence[ReplicaState],
    candidates: Sequence[ReplicaState],
    version: int,
    drain_allowed: bool,
    hold: bool,
) -> Roll | str:
    for replica in replicas:
        if replica.is_draining:
            return f"{replica.name} is rolling"
    free = [replica for replica in candidates if not replica.held]
    if not free:
        return f"version {version} has to wait: every replica that could take it is held to another"
    if not drain_allowed and sum(bool(replica.versions) for replica in replicas) < 2:
        return f"{free[0].name} is the only one that is open, and draining is forbidden"
    return Roll(replica=min(free, key=_work).name, version=version, hold=hold)


def _work(replica: ReplicaState) -> tuple[int, int, str]:
    return replica.sessions, replica.newest, replica.name


def leaving(replicas: Sequence[ReplicaState], count: int) -> list[str]:
    """The `count` replicas that a pool misses least when it shrinks: those that hold nothing alone, and of these those
    with the fewest sessions; the last ones, if nothing else decides."""
    left, gone = list(replicas), []
    for _ in range(count):
        chosen = min(reversed(left), key=lambda each: (bool(each.held), _held_alone(each, left), each.sessions))
        left.remove(chosen)
        gone.append(chosen.name)
    return gone


def _held_alone(replica: ReplicaState, replicas: Sequence[ReplicaState]) -> int:
    others = set[int]().union(*(each.versions for each in replicas if each is not replica))
    return len(set(replica.versions) - others)
