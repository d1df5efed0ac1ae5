"""What containers wrote: one question to the daemon serves all boxes that are looked at in a round."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping

from headrace.actors.sandboxes.provider import pause_s
from headrace.platform.errors import SandboxDied


class Sizes:
    """Bytes by container. `ask` asks the daemon; how often is a matter of how long it takes to
    answer, as with looks."""

    def __init__(self, ask: Callable[[], Awaitable[Mapping[str, int]]]) -> None:
        self._ask = ask
        self._asking = asyncio.Lock()
        self._found: Mapping[str, int] = {}
        self._good_until = 0.0

    async def of(self, container: str) -> int:
        """What a container wrote; 0 for one that is not there."""
        loop = asyncio.get_running_loop()
        async with self._asking:
            began = loop.time()
            if began >= self._good_until:
                with contextlib.suppress(SandboxDied):  # a box whose daemon is gone is gone too
                    self._found = await self._ask()
                self._good_until = loop.time() + pause_s(loop.time() - began) / 2
        return self._found.get(container, 0)
