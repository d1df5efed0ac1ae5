"""A child process whose shell speaks over pipes: the channel of the boxes that this process starts itself.

Reading and writing never block the loop. The end of the shell is seen at once. Processes are named by descriptors, so
that no other process is ever hit by mistake, and are waited for by the loop, whoever is cancelled meanwhile.
"""

import asyncio
import contextlib
import math
import os
import select
import signal
import subprocess
from collections import deque
from collections.abc import Mapping, Sequence, Set
from pathlib import Path

from headrace.actors.sandboxes.alarm import Alarm
from headrace.actors.sandboxes.family import Family
from headrace.actors.sandboxes.processes import Process, descendants, end_below, living
from headrace.actors.sandboxes.threads import ENDS, QUICK
from headrace.platform.errors import SandboxDied

_CHUNK = 1 << 16
_MOST_WAITING = 1 << 18
_END_S = 5.0
_LATE_S = 0.05
"""How long what comes on standard error alone may lie there, where `read` is told that it has time."""


class PipedProcess:
    """One child and its three pipes; a `Channel` once `follow` was told which process the shell is.

    Start it in the thread of the loop, and let that thread outlive it: the kernel ends it with the thread.

    Raises:
        OSError: the program cannot be started.
    """

    def __init__(
        self, argv: Sequence[str], env: Mapping[str, str], pass_fds: Sequence[int] = (), cwd: Path | None = None
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._child = subprocess.Popen(
            argv,
            env=dict(env),
            cwd=cwd,
            pass_fds=tuple(pass_fds),
            bufsize=0,
            start_new_session=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert self._child.stdin and self._child.stdout and self._child.stderr
        self._in, self._out, self._err = (
            pipe.fileno() for pipe in (self._child.stdin, self._child.stdout, self._child.stderr)
        )
        for pipe in (self._in, self._out, self._err):
            os.set_blocking(pipe, False)
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self._queue: deque[tuple[bool, bytes]] = deque()
        self._waiting = 0
        self._reader: asyncio.Future[None] | None = None
        self._late = Alarm(self._wake)
        self._open = {self._out, self._err}
        self._watched: set[int] = set()
        self._why = ""
        self._gone = False
        self._pidfd = os.pidfd_open(self._child.pid)
        self._shell: int | None = None
        self._root = 0
        self._family: Family | None = None
        self.watchers: frozenset[Process] = frozenset()
        """Below the process that is followed, but none of the box's: where that one is not the shell itself."""
        self._loop.add_reader(self._pidfd, self._child_ended)
        self._watch(patient=False)

    @property
    def pid(self) -> int:
        """The child's."""
        return self._child.pid

    @property
    def alive(self) -> bool:
        """Whether the shell runs, as far as is known."""
        return not self._gone

    def follow(self, pid: int) -> None:
        """Name the shell's process: a descendant of the child, or the child itself. Raises SandboxDied."""
        try:
            self._shell = os.pidfd_open(pid)
            self._root, self._family = pid, Family(pid)
        except OSError as error:
            raise SandboxDied(f"the box is gone: its shell ended as it began ({error.strerror})") from None
        self._loop.add_reader(self._shell, self._shell_ended)

    def shell_runs(self) -> bool:
        """Whether it does at this moment, which `alive` may learn a little later."""
        if self._shell is None:
            return False
        poll = select.poll()
        poll.register(self._shell, select.POLLIN)
        return not poll.poll(0)

    async def write(self, data: bytes, until: float = math.inf) -> None:
        """See `Channel.write`."""
        left = memoryview(data)
        while left:
            if self._gone:
                raise SandboxDied(f"the box is gone: {self.cause()}")
            try:
                left = left[os.write(self._in, left) :]
            except BlockingIOError:
                await self._writable(until)
            except OSError:
                raise SandboxDied(f"the box is gone: {self.cause()}") from None

    async def read(self, until: float = math.inf, control: bool = True) -> tuple[bool, bytes]:
        """See `Channel.read`."""
        patient = not control
        while (now := self._loop.time()) < until:
            if self._queue:
                error, data = self._queue.popleft()
                self._waiting -= len(data)
                return error, data
            if self._gone:
                return False, b""
            self._watch(patient)
            self._late.set(min(until, now + _LATE_S) if patient else until)
            self._reader = self._loop.create_future()
            await self._reader
            patient = patient and self._loop.time() < now + _LATE_S
        raise TimeoutError

    async def interrupt(self) -> None:
        """See `Channel.interrupt`."""
        self._send(signal.SIGUSR1)

    @property
    def sees(self) -> bool:
        """See `Channel.sees`."""
        return True

    async def below(self) -> frozenset[Process] | None:
        """See `Channel.below`."""
        # A watcher may have threads, and children of each.
        if self._family and not self.watchers and (found := self._family.only_child()) is not None:
            return found
        if not self.shell_runs():
            return frozenset()
        return await QUICK.do(living, self._root)

    async def end_below(self, but: frozenset[Process]) -> bool:
        """See `Channel.end_below`."""
        return not self.shell_runs() or await ENDS.do(end_below, self._root, _END_S, but, self.watchers)

    async def limit_hit(self) -> str:
        """See `Channel.limit_hit`; there are none that this knows of."""
        return ""

    def cause(self) -> str:
        """See `Channel.cause`."""
        return self._why or "its shell was killed, or ended"

    def kill(self, why: str) -> None:
        """End the shell, and the child with it; `why` becomes the cause, where there is none yet."""
        self._why = self._why or why
        if self._shell is not None:
            self._send(signal.SIGKILL)
        elif not self.ended.done():
            self._kill_family()

    async def close(self) -> None:
        """End everything, and wait until it has ended. Safe to call twice."""
        self.kill("it was closed")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_END_S):
                await asyncio.shield(self.ended)
            return
        self._kill_family()
        await asyncio.shield(self.ended)

    def _send(self, number: signal.Signals) -> None:
        if self._shell is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._shell, number)

    def _kill_family(self) -> None:
        """Kill the child, what it has started, and what it starts at this moment: that is still in its group. As long
        as the child was not waited for, its number is nobody else's."""
        for pid in (*descendants(self._child.pid), -self._child.pid, self._child.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    async def _writable(self, until: float) -> None:
        ready = self._loop.create_future()
        self._loop.add_writer(self._in, lambda: None if ready.done() else ready.set_result(None))
        try:
            left = until - self._loop.time() if until < math.inf else None
            done, _ = await asyncio.wait([ready, self.ended], timeout=left, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not self.ended.done():
                self._loop.remove_writer(self._in)
        if not done:
            raise TimeoutError

    def _watch(self, patient: bool) -> None:
        """Have the loop tell what comes. Patient: on standard error only together with what comes on standard output,
        so that a command wakes the loop once."""
        wanted = self._open - {self._err} if patient else self._open
        if wanted != self._watched:
            self._unwatch(self._watched - wanted)
            for source in wanted - self._watched:
                self._loop.add_reader(source, self._readable, source)
            self._watched = set(wanted)

    def _unwatch(self, sources: Set[int]) -> None:
        for source in sources:
            self._loop.remove_reader(source)
        self._watched -= sources

    def _readable(self, source: int) -> None:
        self._take(source)
        if source == self._out and self._err not in self._watched:
            self._take(self._err)  # after the other: it was written first
        if self._waiting > _MOST_WAITING:
            self._unwatch(self._watched)  # until all of it was read
        self._wake()

    def _take(self, source: int) -> None:
        if source not in self._open:
            return
        try:
            data = os.read(source, _CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self._queue.append((source == self._err, data))
            self._waiting += len(data)
        else:
            self._open.discard(source)
            self._unwatch({source})

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _shell_ended(self) -> None:
        if self._shell is not None:
            self._loop.remove_reader(self._shell)
        self._last_words()

    def _last_words(self) -> None:
        """What is still in the pipes, once; then the box is gone."""
        if not self._gone:
            for source in (self._out, self._err):
                if self._waiting <= _MOST_WAITING:
                    self._take(source)
            self._unwatch(self._open)
            self._gone = True
        self._wake()

    def _child_ended(self) -> None:
        self._loop.remove_reader(self._pidfd)
        self._last_words()
        self._late.stop()
        if self._family is not None:
            self._family.close()
            self._family = None
        if self._shell is not None:
            self._loop.remove_reader(self._shell)
            os.close(self._shell)
            self._shell = None
        else:
            self._kill_family()  # it ended by itself, and what it had begun may wait for it for ever
        self._loop.remove_writer(self._in)
        self._child.wait()
        for pipe in (self._child.stdin, self._child.stdout, self._child.stderr):
            if pipe is not None:
                pipe.close()
        os.close(self._pidfd)
        self._pidfd = -1
        self.ended.set_result(None)
