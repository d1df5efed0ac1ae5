"""Where boxes are looked at: threads of their own, so that no wait for anything else keeps a limit from being seen."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_THREADS = ThreadPoolExecutor(2, thread_name_prefix="box-look")
T = TypeVar("T")


async def looked(look: Callable[[], T]) -> T:
    """What `look` finds. It may block."""
    return await asyncio.get_running_loop().run_in_executor(_THREADS, look)
