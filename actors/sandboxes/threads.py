"""Threads for what blocks in boxes' work, apart from those of the loop, which everything else uses.

There is a pool for each sort of work, so that what an agent made long (a tree of many files, processes that do not end)
holds up nothing but more of the same: no command, no other box's limits, no look-up of a host's name. They are one for
the whole process, because what they bound is the machine's; threads are made when they are first needed.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Threads:
    """At most `most` threads, with their name."""

    def __init__(self, most: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(most, thread_name_prefix=name)

    async def do(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What `work` returns or raises. Cancelled, it is done all the same, unless it has not begun."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, lambda: work(*args, **kwargs))


QUICK = Threads(4, "box-quick")
"""What every command waits for, and takes well under a millisecond for each process of a box."""
FILES = Threads(8, "box-file")
"""One file of a box at a time, of bounded size."""
LOOKS = Threads(2, "box-look")
"""What boxes use of their limits."""
ENDS = Threads(8, "box-end")
"""Ending processes, for seconds where they resist."""
TREES = Threads(4, "box-tree")
"""Whole trees, copied or removed."""
