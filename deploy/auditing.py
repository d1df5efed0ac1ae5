"""The audit of a run: its chains and the heads that its episodes name, read from any run root.

Chains are written on the disk of a node. Where the run root is elsewhere, whoever plays on the node copies them there,
now and then and when it ends: a node that is lost takes no more with it than the entries since the last copy.
"""

import asyncio
import fcntl
import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from headrace.actors.gateway.audit.entry import Entry
from headrace.actors.gateway.audit.verify import SUFFIX, Report, read_entries, verify_chains
from headrace.actors.gateway.place import GatewayPlace
from headrace.platform.config.gateway import GatewayConfig
from headrace.platform.errors import NotFound
from headrace.platform.node_cache import node_cache
from headrace.platform.records.episode import Episode
from headrace.platform.store.episodes import EpisodeStore
from headrace.platform.store.files import open_url, write_atomic
from headrace.platform.store.run_root import RunRoot

_log = logging.getLogger(__name__)
FOLDER = "audit"
COPY_EVERY_S = 60.0
_SHARE = 10
"""Copying takes at most one in so many seconds: a chain is copied whole, as object stores cannot be appended to."""
_SHOWN = 8
_LINGER_S = 0.5  # a run that has ended leaves no process behind


def audit_report(root: RunRoot) -> Report:
    """Every chain verified, and every head that an episode names looked up."""
    heads = {}  # read first: an episode that is stored later may name what is written later
    for episode in EpisodeStore(root.url).iterate():
        if episode.audit_head or _was_answered(episode):
            heads[episode.episode_id] = episode.audit_head
    return verify_chains(_chains(root), heads)


def gateway_place(root: RunRoot, config: GatewayConfig) -> GatewayPlace:
    """Where on this node the gateway of a run lives, for all whose episodes are stored in it: in the run root where
    that is a local disk, else in the user's cache."""
    folder = Path(root.url) if root.is_local else node_cache() / "runs" / root.name
    return GatewayPlace(folder / "gateway", folder / FOLDER, config, _LINGER_S)


def ship_audit(root: RunRoot, place: GatewayPlace) -> None:
    """Copy what is new of this node's chains, in whole lines, to a run root that lies elsewhere; where it is a local
    disk they are there already. Safe to call from several processes at once. Raises OSError."""
    if root.is_local or not place.audit.is_dir():
        return
    fs, path = open_url(root.join(FOLDER))
    with (place.audit / ".copying").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # else what another process read before could come after this
        fs.invalidate_cache()
        for chain in place.audit.glob(f"*{SUFFIX}"):
            lines = chain.read_bytes()
            lines = lines[: lines.rfind(b"\n") + 1]
            copy = f"{path}/{chain.name}"
            if lines and not (fs.exists(copy) and fs.size(copy) == len(lines)):
                write_atomic(fs, copy, lines)


class AuditCopying:
    """Copies this node's chains while a run goes on, and when it ends; nothing where the run root is a local disk.

    Args:
        root: of the run.
        place: the gateway of this node.
        every_s: seconds between two copies, more where they take long.
    """

    def __init__(self, root: RunRoot, place: GatewayPlace, every_s: float = COPY_EVERY_S) -> None:
        self._root, self._place, self._every_s = root, place, every_s
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin, in the loop that is running."""
        if self._task is None and not self._root.is_local:
            self._task = asyncio.get_running_loop().create_task(self._copy())

    async def close(self) -> None:
        """Copy a last time. Raises OSError where that fails."""
        if (task := self._task) is not None:
            task.cancel()
            await asyncio.wait({task})
        await asyncio.to_thread(ship_audit, self._root, self._place)

    async def _copy(self) -> None:
        wait_s = self._every_s
        while True:
            await asyncio.sleep(wait_s)
            began_s = time.monotonic()
            try:
                await asyncio.to_thread(ship_audit, self._root, self._place)
            except Exception:  # whatever a store raises: the next copy has all of it
                _log.warning("the audit could not be copied to %s", self._root.url, exc_info=True)
            wait_s = max(self._every_s, (_SHARE - 1) * (time.monotonic() - began_s))


def report_facts(root: RunRoot, report: Report) -> dict[str, Any]:
    """A report as JSON-safe values."""
    return {
        "run": root.name,
        "holds": report.holds,
        "entries": sum(chain.entries for chain in report.chains),
        "heads": report.heads,
        "chains": msgspec.to_builtins(report.chains),
        "breaks": msgspec.to_builtins(report.breaks),
    }


def last_entries(root: RunRoot, count: int) -> list[Entry]:
    """The newest entries of all chains, oldest first."""
    newest = [entry for _, lines in _chains(root) for entry in deque(read_entries(lines), maxlen=count)]
    return sorted(newest, key=_place)[-count:]


def episode_entries(root: RunRoot, prefix: str) -> tuple[str, list[Entry]]:
    """The id of the episode that `prefix` names, with or without the run's name, and its entries, oldest first.

    Raises:
        NotFound: for none, or for several: then it lists some.
    """
    found: dict[str, list[Entry]] = {}
    for _, lines in _chains(root):
        for entry in read_entries(lines):
            episode = entry.episode
            if episode.startswith(prefix) or episode.removeprefix(f"{root.name}.").startswith(prefix):
                found.setdefault(episode, []).append(entry)
    exact = [episode for episode in found if prefix in (episode, episode.removeprefix(f"{root.name}."))]
    matches = exact if len(exact) == 1 else sorted(found)
    if not matches:
        raise NotFound(f"the audit of {root.name} has no entry of an episode {prefix!r}")
    if len(matches) > 1:
        more = f" and {len(matches) - _SHOWN} more" if len(matches) > _SHOWN else ""
        raise NotFound(f"{prefix!r} fits {len(matches)} episodes: {', '.join(matches[:_SHOWN])}{more}")
    return matches[0], sorted(found[matches[0]], key=_place)


def _chains(root: RunRoot) -> Iterator[tuple[str, Iterable[bytes]]]:
    fs, path = open_url(root.join(FOLDER))
    fs.invalidate_cache()  # other processes write too
    for file in sorted(str(each) for each in fs.glob(f"{path}/*{SUFFIX}")):
        with fs.open(file, "rb") as lines:
            yield file.rsplit("/", 1)[-1].removesuffix(SUFFIX), lines


def _was_answered(episode: Episode) -> bool:
    """Whether a gateway answered a call of its own: turns before a branch are its parent's."""
    own = f"{episode.episode_id}/"
    return any(call.result_hash and call.key.startswith(own) for turn in episode.turns for call in turn.tool_calls)


def _place(entry: Entry) -> tuple[float, str, int]:
    return entry.time_s, entry.chain, entry.number
