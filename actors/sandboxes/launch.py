"""Becomes the shell of a box without namespaces: `python -I -S launch.py PARENT LIMITS PROGRAM ARGUMENT…`.

Before that it makes itself the one to whom orphans below it fall (so that none is lost), ends with the process PARENT,
and sets its limits (`number=most`, joined by commas), which all that it starts inherit. It imports nothing of headrace,
and is run by path.
"""

import ctypes
import os
import resource
import signal
import sys

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38


def main(parent: int, limits: str, argv: list[str]) -> None:
    """Replace this process by the program."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        return
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    for limit in filter(None, limits.split(",")):
        number, most = map(int, limit.split("="))
        _, hard = resource.getrlimit(number)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(number, (most, most))
    # Python's own defaults are not those of a program.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.execve(argv[0], argv, {name: value for name, value in os.environ.items() if name != "LC_CTYPE"})


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
