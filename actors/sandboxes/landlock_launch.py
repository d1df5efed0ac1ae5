"""Runs a program confined by Landlock and seccomp, and watches over it: `python -I landlock_launch.py SPECIFICATION`.

A process of its own for each box, so that what supervises a box's system calls shares nothing with whoever owns it.
The box ends with it; launch.py, of which it is the continuation, sees to it that it ends with its owner and that
orphans of the box fall to it. SIGUSR1 is passed on to the program. It imports nothing of headrace, and is run by path.

The specification is JSON: `argv`, `readable` and `writable` (paths), `cwd`, `pids`, `network`. The
environment is passed on as it is.
"""

import contextlib
import json
import os
import select
import signal
import sys
from typing import Any


def main(specification: dict[str, Any]) -> int:
    """Run it to its end."""
    from sandlock import Sandbox, StdioMode

    everywhere = {"net_allow": ["*:*"], "net_allow_bind": ["*"]} if specification["network"] else {}
    box = Sandbox(
        fs_readable=specification["readable"],
        fs_writable=specification["writable"],
        cwd=specification["cwd"],
        clean_env=True,
        env=dict(os.environ),
        max_processes=specification["pids"],
        **everywhere,
    )
    process = box.popen(specification["argv"], StdioMode.INHERIT, StdioMode.INHERIT, StdioMode.INHERIT)
    shell = process.pid
    if shell is None:
        return 1
    # Only now: the box must not inherit it.
    waited = {signal.SIGUSR1, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, waited)
    ended = os.pidfd_open(shell)
    for number in range(3):
        os.close(number)  # the box has them: their end is to be its end
    while not _readable(ended):
        if signal.sigwait(waited) == signal.SIGUSR1 and not _readable(ended):
            signal.pidfd_send_signal(ended, signal.SIGUSR1)
        else:
            _wait_for_orphans(shell)
    process.wait()
    return 0


def _readable(descriptor: int) -> bool:
    return bool(select.select([descriptor], [], [], 0)[0])


def _wait_for_orphans(shell: int) -> None:
    """Those that have ended. The shell is left to whoever started it, who may also be faster with another."""
    with contextlib.suppress(ChildProcessError):
        while found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if found.si_pid == shell:
                return
            os.waitpid(found.si_pid, 0)


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
