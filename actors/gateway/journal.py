"""What was decided and done under each key, so that the same key again gives the same answer (P25), also after a crash.

::

    intent ──► decided ──► settled         (a turn without effects begins at decided)

Owns the files `journal-v1-NNNNNN` in a folder of the gateway's home, one of which is written (of another format
nothing is read). A record is the whole state
of one key, later ones supersede earlier ones, and a scope is forgotten as a whole (P26). What contents there are of
turns with effects is on disk; of other turns the disk keeps that they were decided, and on what calls: they can be run
again. Contents in memory are bounded: beyond `memory_bytes` the oldest are read from disk when they are wanted, or,
without effects, no longer known. When most of a file is forgotten or superseded, a new one is begun, what lives is
copied a few records at a call, and the old one goes once the copies are on disk. Keys are the caller's: it says when
to wait for the disk, and when a scope's grace is over. Only what an earlier process left and nobody asks for goes by
itself.
"""

import asyncio
import contextlib
import os
import re
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from headrace.actors.gateway.group_writer import GroupWriter, sync_folder
from headrace.actors.gateway.journal_file import OVERHEAD, JournalFile
from headrace.platform.contracts import CallVerdict, ToolResult

State = Literal["intent", "not_begun", "decided", "settled"]

UNCLAIMED_S = 600.0
_NAME = re.compile(r"journal-v1-(\d{6,})")
_COPIED_AT_ONCE = 8


class Known(msgspec.Struct, frozen=True, gc=False):
    """What is known of a key. After "intent" an effect was begun, and nobody knows how it ended; after "not_begun" none
    was, though there had been an intent.

    `again`: the verdicts and results were not kept, as the turn had no effects; decide and run it again.
    """

    calls_hash: bytes
    state: State
    verdicts: tuple[CallVerdict, ...] = ()
    results: tuple[ToolResult, ...] = ()
    again: bool = False


class _Record(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One frame. Without a `known` the scope is forgotten."""

    scope: str
    key: str = ""
    known: Known | None = None


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Record).decode


class _Slot:
    """One key in memory: where its record is, and what is known, unless that is to be read there."""

    __slots__ = ("effects", "file", "known", "length", "number", "place", "size")

    def __init__(self, file: JournalFile) -> None:
        self.file = file
        self.number = self.place = self.length = 0
        self.effects = False
        self.known: Known | None = None
        self.size = 0  # of the contents in memory


class Journal:
    """The journal of one gateway process. Nobody else may have the folder; its calls belong to one thread.

    Args:
        home: the gateway's; files lie in `home/journal`.
        flush_s: seconds until a record that nobody waits for is on disk.
        memory_bytes: bound on contents in memory.
        renew_bytes: below this size no file is renewed.
        now: seconds of a monotonic clock.
        sync: see `GroupWriter`.

    Raises:
        OSError: it cannot be read or written.
    """

    def __init__(
        self,
        home: Path,
        flush_s: float = 0.2,
        memory_bytes: int = 64 * 1024 * 1024,
        renew_bytes: int = 16 * 1024 * 1024,
        now: Callable[[], float] = time.monotonic,
        sync: Callable[[int], None] = os.fdatasync,
    ) -> None:
        self._folder = home / "journal"
        self._flush_s, self._memory_bytes, self._renew_bytes = flush_s, memory_bytes, renew_bytes
        self._now, self._sync = now, sync
        self._scopes: dict[str, dict[str, _Slot]] = {}
        self._in_memory: OrderedDict[_Slot, None] = OrderedDict()  # those with contents, oldest first
        self._memory = self._live = 0
        self._old: list[JournalFile] = []
        self._moving: deque[_Slot] = deque()
        self._last = 0  # the number of the last record of the current file
        self._fence = 0  # when this one is on disk, nothing needs the old files any more
        self._closed = False
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        begun = self._load()
        self._unclaimed = set(self._scopes)
        self._unclaimed_until = now() + UNCLAIMED_S
        self._current = self._begin(begun + 1)

    @property
    def failure(self) -> OSError | None:
        """What ended the writing; None as long as it goes well."""
        return self._current.writer.failure if self._current.writer is not None else None

    @property
    def scopes(self) -> tuple[str, ...]:
        """Those that are not forgotten."""
        return tuple(self._scopes)

    @property
    def memory_bytes(self) -> int:
        """Size of the contents in memory."""
        return self._memory

    def known(self, scope: str, key: str) -> Known | None:
        """What is known of a key; None for one that is new. Raises OSError where the disk lost it."""
        slots = self._scopes.get(scope)
        slot = slots.get(key) if slots is not None else None
        if slot is None:
            return None
        if self._unclaimed:
            self._unclaimed.discard(scope)
        return slot.known if slot.known is not None else _decode(slot.file.read(slot.place)).known

    def intent(self, scope: str, key: str, calls_hash: bytes) -> None:
        """An effect is about to be begun. Wait for `durable` before it is (P25).

        Raises:
            ValueError: the key belongs to other calls.
            OSError: the journal has failed.
        """
        self._put(scope, key, Known(calls_hash, "intent"), effects=True)

    def not_begun(self, scope: str, key: str, calls_hash: bytes) -> None:
        """The effect that was intended was not begun, and will not be by this intent. Raises as `intent`."""
        self._put(scope, key, Known(calls_hash, "not_begun"), effects=True)

    def decided(self, scope: str, key: str, calls_hash: bytes, verdicts: Sequence[CallVerdict], effects: bool) -> None:
        """The verdicts on a turn's calls, with the results of those that were performed here.

        Args:
            scope: of the session.
            key: of the turn.
            calls_hash: tells calls from others.
            verdicts: in the order of the calls.
            effects: one of the calls is more than a read, so that the verdicts have to outlive the process.

        Raises:
            ValueError: the key belongs to other calls.
            OSError: the journal has failed.
        """
        self._put(scope, key, Known(calls_hash, "decided", tuple(verdicts)), effects)

    def settled(self, scope: str, key: str, results: Sequence[ToolResult]) -> None:
        """What the allowed calls of a turn gave back.

        Raises:
            KeyError: nothing is known of the key.
            OSError: the journal has failed.
        """
        before = self.known(scope, key)
        if before is None:
            raise KeyError(key)
        known = Known(before.calls_hash, "settled", before.verdicts, tuple(results), before.again)
        self._put(scope, key, known, effects=False)

    def durable(self) -> asyncio.Future[None]:
        """Asks for all that was told so far to be on disk, at once; await it. Raises OSError where it is not."""
        writer = self._current.writer
        assert writer is not None
        return writer.durable(self._last)

    def forget(self, scope: str) -> None:
        """The scope is over, and so is its grace (P26). An unknown one is passed over."""
        if scope in self._scopes:
            with contextlib.suppress(OSError):  # it is over all the same; whoever wants to write again gets the error
                self._forget(scope)
                self._tidy()

    def close(self) -> None:
        """Bring everything to disk. Safe to call twice. Raises OSError where something is not."""
        if self._closed:
            return
        self._closed = True
        try:
            self._current.finish()
        finally:
            for file in (*self._old, self._current):
                file.close()

    # --- keys -------------------------------------------------------------------------------------------------------

    def _put(self, scope: str, key: str, known: Known, effects: bool) -> None:
        slots = self._scopes.get(scope)
        if slots is None:
            slots = {}
        slot = slots.get(key)
        if slot is None:
            slot = _Slot(self._current)
        elif known.state != "settled" and self._hash(scope, key) != known.calls_hash:
            raise ValueError(f"the key {key!r} belongs to other calls")
        slot.effects = slot.effects or effects
        if slot.effects:
            self._write(slot, _encode(_Record(scope, key, known)))
        elif not slot.length:
            self._write(slot, _encode(_Record(scope, key, Known(known.calls_hash, "decided", again=True))))
        slots[key] = slot
        self._scopes[scope] = slots
        self._keep(slot, known)
        self._tidy()

    def _hash(self, scope: str, key: str) -> bytes:
        known = self.known(scope, key)
        return known.calls_hash if known is not None else b""

    def _keep(self, slot: _Slot, known: Known) -> None:
        if slot.size:
            self._drop(slot)
        slot.known, size = known, 0
        for verdict in known.verdicts:
            if verdict.result is not None:
                size += len(verdict.result.content)
        for result in known.results:
            size += len(result.content)
        if size:
            slot.size = size
            self._in_memory[slot] = None
            self._memory += size
            if self._memory > self._memory_bytes:
                self._evict()

    def _evict(self) -> None:
        while self._memory > self._memory_bytes:
            slot = next(iter(self._in_memory))
            if slot.effects and not slot.file.holds(slot.number):
                return  # it will be there in a moment
            known = slot.known
            self._drop(slot)
            if known is not None and not slot.effects:
                slot.known = Known(known.calls_hash, known.state, again=True)

    def _drop(self, slot: _Slot) -> None:
        self._in_memory.pop(slot, None)
        self._memory -= slot.size
        slot.known, slot.size = None, 0

    def _forget(self, scope: str) -> None:
        self._unclaimed.discard(scope)
        for slot in self._scopes.pop(scope).values():
            self._drop(slot)
            self._live -= slot.length
            slot.length = 0
        self._append(_encode(_Record(scope)))

    # --- files ------------------------------------------------------------------------------------------------------

    def _load(self) -> int:
        """Take up what earlier processes left; the highest number of their files."""
        found = sorted((int(name[1]), path) for path in self._folder.iterdir() if (name := _NAME.fullmatch(path.name)))
        for _, path in found:
            file = JournalFile(path)
            self._old.append(file)
            for place, data in file.frames():
                record = _decode(data)
                if record.known is None:
                    self._scopes.pop(record.scope, None)
                    continue
                slot = self._scopes.setdefault(record.scope, {}).setdefault(record.key, _Slot(file))
                slot.effects, slot.file = not record.known.again, file
                slot.place, slot.length = place, OVERHEAD + len(data)
        self._moving.extend(slot for slots in self._scopes.values() for slot in slots.values())
        self._live = sum(slot.length for slot in self._moving)
        return found[-1][0] if found else 0

    def _begin(self, number: int) -> JournalFile:
        self._last = self._fence = 0
        path = self._folder / f"journal-v1-{number:06d}"
        return JournalFile(path, GroupWriter(path, self._flush_s, sync=self._sync))

    def _append(self, data: bytes) -> int:
        self._last, place = self._current.append(data)
        return place

    def _write(self, slot: _Slot, data: bytes) -> None:
        place = self._append(data)
        self._live += OVERHEAD + len(data) - slot.length
        slot.file, slot.number, slot.place, slot.length = self._current, self._last, place, OVERHEAD + len(data)

    def _tidy(self) -> None:
        """A little of what has to be done now and then."""
        if self._unclaimed and self._now() > self._unclaimed_until:
            self._forget(self._unclaimed.pop())
        if self._moving:
            self._move()
        elif self._old:
            if self._current.holds(self._fence):
                self._discard_old()
        elif self._current.size > max(self._renew_bytes, 4 * self._live):
            self._renew()

    def _renew(self) -> None:
        """Begin a new file. What is in the old one is brought to disk first, as `durable` looks at the new one only."""
        self._current.finish()
        old, number = self._current, int(self._current.path.name.rpartition("-")[2])
        self._current = self._begin(number + 1)
        self._old.append(old)
        self._moving.extend(slot for slots in self._scopes.values() for slot in slots.values())

    def _move(self) -> None:
        for _ in range(min(_COPIED_AT_ONCE, len(self._moving))):
            slot = self._moving.popleft()
            if not slot.length or slot.file is self._current:
                continue
            data = slot.file.read(slot.place)
            self._write(slot, data)
            if slot.known is None and (known := _decode(data).known) is not None:
                self._keep(slot, known)  # until the copy can be read
        if not self._moving:
            self._fence = self._last

    def _discard_old(self) -> None:
        for file in self._old:
            file.close()
            file.path.unlink()
        self._old = []
        sync_folder(self._folder)
