"""What the boxes of every kind have in common: how many there may be, who looks after them, and how they end.

    create/restore ─► room for one (P21) ─► `_start` of the kind ─► Box ── run/read/write ─► Shell ─► channel
                                                                    │
    one task a box: every LOOK_S `look` (disk, memory, processes); one a provider: every REAP_S `reap`

Invariants: a start that fails or is cancelled leaves no process, folder, group or room taken (case X4); a box gives its
room back once, when it has ended; nothing here blocks the loop.

A kind adds a subclass of BoxProvider (`_start`, `_forget`, `reap`) and one of Box (its files, its snapshots, its end,
and what it is over).
"""

import asyncio
import contextlib
import logging
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from headrace.actors.sandboxes.shell import Shell, ShellState
from headrace.actors.sandboxes.threads import TREES
from headrace.platform.config.sandbox import SandboxConfig
from headrace.platform.contracts import BoxLimits, CommandResult, Sandbox
from headrace.platform.errors import SandboxDied

_log = logging.getLogger(__name__)
START_S = 15.0
"""How long a box may take to come up (case X7)."""
LOOK_S = 0.25
REAP_S = 5.0
_NO_LIMIT = 1 << 30
_MOST_ENDING = 8
_MOST_FILES = 2
"""Of one box at once: it may hold up its own, not everybody's."""
_SHARE = 4.0
"""A look leaves this many parts of the time to everything else for each that it takes."""


class Box(ABC):
    """One box: its shell, and what its kind knows. See `Sandbox`."""

    workspace: str

    def __init__(self, sandbox_id: str, shell: Shell, limits: BoxLimits) -> None:
        self.sandbox_id = sandbox_id
        self.shell = shell
        self.limits = limits
        self._closing: asyncio.Task[None] | None = None
        self._files = asyncio.Semaphore(_MOST_FILES)
        self.killed = False
        self.when_closed: Callable[[], None] = lambda: None

    async def run(self, command: str, timeout_s: float, silence_s: float | None = None) -> CommandResult:
        """See `Sandbox.run`."""
        self._check_open()
        return await self.shell.run(command, timeout_s, silence_s)

    async def read(self, path: str) -> bytes:
        """See `Sandbox.read`."""
        async with self._files:
            self._check_open()
            return await self._read(path, self.limits.file_mb << 20)

    async def write(self, path: str, data: bytes) -> None:
        """See `Sandbox.write`."""
        async with self._files:
            self._check_open()
            await self._write(path, data, self.limits.file_mb << 20)

    async def snapshot(self) -> str:
        """See `Sandbox.snapshot`."""
        self._check_open()
        state = await self.shell.quiet()
        try:
            return await self._keep(state)
        except OSError as error:
            raise SandboxDied(f"no snapshot of the box {self.sandbox_id}: {error}") from error
        finally:
            await self.shell.resume()

    async def close(self) -> None:
        """See `Sandbox.close`. Ends the box even where it is cancelled."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._end_and_leave())
        await asyncio.shield(self._closing)

    def kill(self, why: str) -> None:
        """End its processes at once; `why` is what every later call says."""
        self.killed = True
        self.shell.give_up(why)
        self._kill(why)

    async def look(self) -> None:
        """Kill it when it is over a limit that the kernel does not hold. What runs in it may outlive its shell's
        answers."""
        if self._closing is None and not self.killed and (over := await self._over()):
            self.kill(over)

    def _check_open(self) -> None:
        if self._closing is not None:
            raise SandboxDied(f"the box {self.sandbox_id} is closed")

    async def _end_and_leave(self) -> None:
        try:
            await self._end()
        finally:
            self.when_closed()

    @abstractmethod
    async def _read(self, path: str, limit: int) -> bytes: ...

    @abstractmethod
    async def _write(self, path: str, data: bytes, limit: int) -> None: ...

    @abstractmethod
    async def _keep(self, state: ShellState) -> str:
        """Keep a snapshot of a box in which nothing runs; its id."""

    @abstractmethod
    async def _over(self) -> str:
        """The limit that it has passed, in words, or ""."""

    @abstractmethod
    def _kill(self, why: str) -> None: ...

    @abstractmethod
    async def _end(self) -> None:
        """End every process in it and remove what it had. Called once."""


class BoxProvider(ABC):
    """See `SandboxProvider`. Use it from one loop."""

    mode: str
    image_digest = ""

    def __init__(self, config: SandboxConfig, state: Path) -> None:
        self.config = config
        self.limits = config.limits()
        self.state = state
        self._room = asyncio.Semaphore(config.max_boxes or _NO_LIMIT)
        self._boxes: dict[str, Box] = {}
        self._snapshots: dict[str, Any] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._keeper: asyncio.Task[None] | None = None
        self._looks: dict[str, asyncio.Task[None]] = {}
        self._made = self._starting = 0
        self._started = asyncio.Event()
        self._closed = False

    async def create(self) -> Sandbox:
        """See `SandboxProvider.create`."""
        return await self._box(None)

    async def restore(self, snapshot_id: str) -> Sandbox:
        """See `SandboxProvider.restore`."""
        if snapshot_id not in self._snapshots:
            raise KeyError(snapshot_id)
        return await self._box(snapshot_id)

    async def discard(self, snapshot_id: str) -> None:
        """See `SandboxProvider.discard`."""
        snapshot = self._snapshots.pop(snapshot_id, None)
        if snapshot is not None:
            await self._forget(snapshot)

    @abstractmethod
    async def reap(self) -> int:
        """See `SandboxProvider.reap`."""

    async def close(self) -> None:
        """See `SandboxProvider.close`."""
        self._closed = True
        if self._keeper is not None:
            self._keeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._keeper
            self._keeper = None
        while self._starting:
            self._started.clear()
            await self._started.wait()
        await asyncio.gather(*(box.close() for box in list(self._boxes.values())))
        for snapshot_id in list(self._snapshots):
            await self.discard(snapshot_id)
        while self._ending:
            await asyncio.wait(self._ending)
        await self._release()

    def remember(self, snapshot: Any) -> str:
        """Keep a kind's snapshot; its id."""
        snapshot_id = f"{self.mode}-{secrets.token_hex(8)}"
        self._snapshots[snapshot_id] = snapshot
        return snapshot_id

    async def clear_away(self, remove: Callable[[], None]) -> None:
        """Have files and groups removed in a thread. Whoever closes a box does not wait for that, unless much waits."""
        task = asyncio.create_task(_cleared(remove))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        if len(self._ending) > _MOST_ENDING:
            await asyncio.shield(task)

    def finish(self, work: Coroutine[Any, Any, None]) -> "asyncio.Future[None]":
        """Run `work` to its end whatever happens to who waits for it; `close` waits for it too."""
        task = asyncio.create_task(work)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        return asyncio.shield(task)

    async def whole(self, work: Coroutine[Any, Any, Any], undo: Callable[[], None]) -> None:
        """Run `work` to its end; where nobody waits for it any more, undo it then (in a thread)."""
        task = asyncio.create_task(work)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            self.finish(_undone(task, undo)).add_done_callback(lambda done: done.cancelled() or done.exception())
            raise

    async def _box(self, snapshot_id: str | None) -> Box:
        if self._is_closed():
            raise SandboxDied("no box: its provider is closed")
        if self._keeper is None:
            self._keeper = asyncio.create_task(self._keep_house())
        await self._room.acquire()
        self._made += 1
        self._starting += 1
        try:
            if self._is_closed():
                raise SandboxDied("no box: its provider is closed")
            # It may have been discarded while there was no room.
            box = await self._start(self._made, self._snapshots[snapshot_id] if snapshot_id is not None else None)
        except OSError as error:
            self._room.release()
            raise SandboxDied(f"no box: {error}") from error
        except BaseException:
            self._room.release()
            raise
        finally:
            self._starting -= 1
            self._started.set()
        self._boxes[box.sandbox_id] = box
        self._looks[box.sandbox_id] = asyncio.create_task(_look_after(box))
        box.when_closed = lambda: self._leave(box)
        if self._is_closed():
            await box.close()
            raise SandboxDied("no box: its provider is closed")
        return box

    def _is_closed(self) -> bool:
        return self._closed

    def _leave(self, box: Box) -> None:
        if self._boxes.pop(box.sandbox_id, None) is not None:
            self._looks.pop(box.sandbox_id).cancel()
            self._room.release()

    async def _keep_house(self) -> None:
        """Look for leftovers. What goes wrong with some is no reason to let those that come later lie."""
        while True:
            try:
                await self.reap()
            except Exception:
                _log.warning("sandboxes: leftovers were not removed", exc_info=True)
            await asyncio.sleep(REAP_S)

    @abstractmethod
    async def _start(self, number: int, snapshot: Any) -> Box:
        """A box that is up. Leaves nothing behind when it raises or is cancelled."""

    @abstractmethod
    async def _forget(self, snapshot: Any) -> None:
        """Let go of a snapshot's files."""

    @abstractmethod
    async def _release(self) -> None:
        """Let go of what the provider has besides boxes and snapshots. Called by every `close`."""


def pause_s(took_s: float) -> float:
    """How long until the next look, after one that took so long."""
    return max(LOOK_S, _SHARE * took_s)


async def _look_after(box: Box) -> None:
    """Look at one box as long as it is there, at a pace of its own: one that takes long keeps no other waiting."""
    loop = asyncio.get_running_loop()
    pause = LOOK_S
    while not box.killed:
        await asyncio.sleep(pause)
        began = loop.time()
        try:
            await box.look()
        except Exception as error:  # a box that cannot be measured is a box without limits
            box.kill(f"what it uses cannot be measured: {error}")
        pause = pause_s(loop.time() - began)


async def _cleared(remove: Callable[[], None]) -> None:
    try:
        await TREES.do(remove)
    except OSError:
        _log.warning("sandboxes: something of a box that has ended was not removed", exc_info=True)


async def _undone(task: "asyncio.Task[Any]", undo: Callable[[], None]) -> None:
    with contextlib.suppress(Exception):  # it left nothing then
        await task
    await TREES.do(undo)
