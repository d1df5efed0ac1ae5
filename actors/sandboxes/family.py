"""What runs below one process, asked before every command: a few reads where that is only one other process.

Most commands leave nothing behind: below the outer shell there is the inner one, and nothing else. Descriptors of what
/proc says of these two are kept open; they belong to the processes, not to their numbers, so no later process of the
same number is ever taken for one of them. Where there is more, `processes.living` looks at all of it.
"""

import contextlib
import os

from headrace.actors.sandboxes.processes import Process, process_of

_MOST = 64
_ONE_THREAD = 3
"""Links of a process's folder of threads where it has one."""


class Family:
    """The processes below `root`, which has one thread."""

    def __init__(self, root: int) -> None:
        self.root = root
        self._children = -1
        self._of_child: list[int] = []
        self._seen = b""
        self._found: frozenset[Process] = frozenset()

    def only_child(self) -> frozenset[Process] | None:
        """The one process below `root`, where there is just one; else, or where that is not known, None. Does not
        block."""
        try:
            if self._children < 0:
                self._children = os.open(f"/proc/{self.root}/task/{self.root}/children", os.O_RDONLY | os.O_CLOEXEC)
            seen = os.pread(self._children, _MOST, 0)
            if seen != self._seen:
                self._meet(seen)
            if self._of_child:
                threads, children = self._of_child
                if os.fstat(threads).st_nlink == _ONE_THREAD and not os.pread(children, 1, 0):
                    return self._found
        except OSError:  # one of them has ended
            self._leave_child()
        return None

    def close(self) -> None:
        """Let go of the descriptors. Safe to call twice."""
        self._leave_child()
        if self._children >= 0:
            os.close(self._children)
            self._children = -1

    def _meet(self, seen: bytes) -> None:
        self._leave_child()
        numbers = seen.split()
        if len(numbers) != 1:
            return
        pid = int(numbers[0])
        self._of_child.append(os.open(f"/proc/{pid}/task", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
        self._of_child.append(os.open(f"/proc/{pid}/task/{pid}/children", os.O_RDONLY | os.O_CLOEXEC))
        child = process_of(pid)
        # As long as it is a child of `root`, the number was nobody else's meanwhile.
        if child is None or os.pread(self._children, _MOST, 0) != seen:
            self._leave_child()
            return
        self._seen, self._found = seen, frozenset((child,))

    def _leave_child(self) -> None:
        for file in self._of_child:
            with contextlib.suppress(OSError):
                os.close(file)
        self._of_child = []
        self._seen = b""
