"""The gateway process: `python -m headrace.actors.gateway.process HOME AUDIT`.

::

    whoever starts it ── waits for ─► this ── fork ─► the gateway: pid lock ► journal ► socket ► "ready"
                                       │ exits 0            │
                                       ▼                    ▼ SIGTERM, or nobody is connected any more
                                                  no new connections ► what runs is finished ► audit and journal on disk

It detaches itself, so that it is nobody's child and outlives whoever needed it first. One process has a home, for as
long as it holds its `pid`; the next one waits for that, so that journal and audit have one writer. All that it needs
to know are its arguments; heavy imports come after the fork.
"""

import argparse
import asyncio
import contextlib
import fcntl
import gc
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.actors.gateway.home import Home

if TYPE_CHECKING:
    from headrace.actors.gateway.perform.connector import Ways

READY = b"ready"
NOBODY_CAME_S = 30.0
_LOCK_S = 20.0


def main(argv: Sequence[str] | None = None, ways: "Callable[[], Ways] | None" = None) -> int:
    """Start a gateway and wait until it listens; the exit code, 0 when it does.

    Args:
        argv: see the module.
        ways: other ways out than the system's, for whoever wants to see what would leave the host; called after the
            fork.
    """
    parser = argparse.ArgumentParser(prog="headrace.actors.gateway.process", description=__doc__)
    parser.add_argument("home", type=Path, help="folder of this user alone")
    parser.add_argument("audit", type=Path, help="folder of the audit chains")
    parser.add_argument("--audit", dest="mode", choices=("group", "each"), default="group")
    parser.add_argument("--flush-s", type=float, default=0.2)
    parser.add_argument("--deadline-s", type=float, default=10.0)
    parser.add_argument("--linger-s", type=float, default=5.0, help="seconds that it outlives its last connection")
    arguments = parser.parse_args(argv)
    try:
        home = Home(arguments.home)
    except OSError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.close(reader)
        _run(home, arguments, writer, ways)
    os.close(writer)
    with os.fdopen(reader, "rb") as said:
        told = said.read()
    if told == READY:
        return 0
    sys.stderr.write(told.decode(errors="replace") or "the gateway died while it was starting\n")
    return 1


def _run(home: Home, arguments: argparse.Namespace, writer: int, ways: "Callable[[], Ways] | None") -> None:
    """The life of the gateway; never returns."""
    code = 1
    try:
        _detach(home)
        lock = _take(home)
        asyncio.run(_serve(home, arguments, writer, ways))
        os.close(lock)
        code = 0
    except BaseException as error:
        import traceback

        traceback.print_exc()
        with contextlib.suppress(OSError):  # nobody listens: it was ready long ago
            os.write(writer, f"{type(error).__name__}: {error}\n".encode())
    finally:
        sys.stderr.flush()
        os._exit(code)


def _detach(home: Home) -> None:
    """A session of its own; input from nowhere, output to the log."""
    os.setsid()
    os.umask(0o077)
    nowhere = os.open(os.devnull, os.O_RDONLY)
    log = os.open(home.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for file, standard in ((nowhere, 0), (log, 1), (log, 2)):
        os.dup2(file, standard)
    os.close(nowhere)
    os.close(log)


def _take(home: Home) -> int:
    """The one process of a home; waits for one that is ending. Raises TimeoutError."""
    file = os.open(home.pid, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    until = time.monotonic() + _LOCK_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > until:
                raise TimeoutError(f"another gateway has {home.path}, and does not end") from None
            time.sleep(0.02)
    os.ftruncate(file, 0)
    os.pwrite(file, f"{os.getpid()}\n".encode(), 0)
    return file


async def _serve(home: Home, arguments: argparse.Namespace, writer: int, ways: "Callable[[], Ways] | None") -> None:
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # nothing is multiplied here
    from headrace.actors.gateway.assembly import assemble

    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    address, token = home.settle_in()
    gateway = assemble(home.path, arguments, token, time.monotonic, ways() if ways is not None else None)
    listening = await loop.create_unix_server(gateway.server.connection, address, backlog=1024)
    gc.freeze()  # what there is now stays; of what comes, most goes by itself
    gc.set_threshold(10_000, 20, 100)
    os.write(writer, READY)
    os.close(writer)
    try:
        while not stop.is_set():
            try:
                async with asyncio.timeout(min(1.0, arguments.linger_s / 4)):
                    await stop.wait()
            except TimeoutError:
                gateway.server.sweep()
            if gateway.failure is not None:  # whoever asks next starts another
                break
            if gateway.server.idle_s > (arguments.linger_s if gateway.server.ever_served else NOBODY_CAME_S):
                break
    finally:
        listening.close()
        home.leave()
        await gateway.server.finish(arguments.deadline_s)
        await gateway.close()


if __name__ == "__main__":
    sys.exit(main())
