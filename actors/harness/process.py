"""A harness that the worker starts itself: one process for each episode, in a fresh folder and a clean environment.

It is no sandbox: the program runs as the worker does, and what it may do is not headrace's to decide.
"""

import asyncio
import contextlib
import os
import signal
import tempfile
from collections.abc import Mapping, Sequence

from headrace.platform.errors import ConfigError, EnvironmentFault

_KEPT = ("PATH", "LANG", "LC_ALL", "TZ")  # of the worker's environment: what else is there may be secret
_TAIL = 2000  # characters
_KILL_S = 5.0
_LAST_WORDS_S = 1.0
_LOOK_S = 0.2


async def run_harness(command: Sequence[str], env: Mapping[str, str]) -> None:
    """Run the program to its end. Cancelling kills it and everything that it started.

    Raises:
        ConfigError: there is no such program.
        EnvironmentFault: it ended with an error; the message has the end of what it said.
    """
    with tempfile.TemporaryDirectory(prefix="headrace-harness-", ignore_cleanup_errors=True) as folder:
        kept = {key: os.environ[key] for key in _KEPT if key in os.environ}
        own = {**kept, "HOME": folder, "TMPDIR": folder, **env}
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                cwd=folder,
                env=own,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise ConfigError(f"the harness {command[0]} cannot be started: {error.strerror or error}") from error
        said = bytearray()
        listening = asyncio.create_task(_listen(process, said))
        try:
            code = await _ended(process)
        finally:
            await _kill(process)
            await asyncio.wait({listening}, timeout=_LAST_WORDS_S)
            listening.cancel()
        if code:
            told = said.decode(errors="replace").strip()
            raise EnvironmentFault(f"the harness ended with {code}: {told or 'it said nothing'}")


async def _ended(process: asyncio.subprocess.Process) -> int:
    """Its exit code, once it has ended. `process.wait` waits for the end of its output, too, which what it has started
    may hold open for ever."""
    waiting = asyncio.create_task(process.wait())
    try:
        while process.returncode is None:
            await asyncio.wait({waiting}, timeout=_LOOK_S)
    finally:
        waiting.cancel()
    return process.returncode


async def _listen(process: asyncio.subprocess.Process, said: bytearray) -> None:
    """Keep the end of what the process writes."""
    assert process.stdout is not None
    while piece := await process.stdout.read(1 << 16):
        said += piece
        del said[:-_TAIL]


async def _kill(process: asyncio.subprocess.Process) -> None:
    """End the process's whole group; what is gone already is no matter."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_KILL_S):
            await process.wait()
