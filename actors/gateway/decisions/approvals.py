"""Who is asked about a call that cannot be undone: nobody, a function of the user's, or a person.

::

    "deny"             a no, at once
    ./file.py:name     name(tool, arguments, episode) in a thread: True is a yes, all else a no
    "queue"            a file that `headrace approvals` shows and answers; see `approval_queue`

Whoever does not answer within the policy's deadline has said no. The loop is never blocked. What a person reads is the
call as it will be made; an answer counts once, for that call alone.
"""

import asyncio
import contextlib
import copy
import inspect
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headrace.actors.gateway.decisions import approval_queue
from headrace.actors.gateway.decisions.asked import Asked, Denial, EpisodeState
from headrace.platform.errors import ConfigError

FOLDER = "approvals"
_LOOK_EVERY_S = 0.1
_MOST_AT_ONCE = 32
"""Threads of functions that have not answered; one that never does keeps its own."""
_NOBODY = Denial("tier:approval_denied", "it cannot be undone, and nobody may approve of it here")
_NO = Denial("tier:approval_denied", "it cannot be undone, and was not approved")
_LATE = Denial("tier:approval_timeout", "it cannot be undone, and nobody approved of it in time")
Approve = Callable[[str, dict[str, Any], str], object]


class Approvals:
    """Asks.

    Args:
        home: the gateway's folder; questions lie in its folder `approvals`.
        clock: seconds since the epoch, for whoever reads a question elsewhere.
    """

    def __init__(self, home: Path, clock: Callable[[], float] = time.time) -> None:
        self._folder = home / FOLDER
        self._clock = clock
        self._is_clean = False
        self._functions = _Functions()

    async def decide(self, asked: Asked, state: EpisodeState) -> Denial | None:
        """Ask about one call, as its episode's policy says.

        Raises:
            ConfigError: the policy names no function, or one that cannot be loaded.
            Exception: the function's own; there is no decision then.
            OSError: the question cannot be written down.
        """
        policy = state.policy
        if policy.approvals == "deny":
            return _NOBODY
        try:
            async with asyncio.timeout(policy.approval_s):
                if policy.approvals == "queue":
                    return await self._queued(asked, state)
                return await self._functions.ask(policy.approvals, asked, state)
        except TimeoutError:
            return _LATE

    async def _queued(self, asked: Asked, state: EpisodeState) -> Denial | None:
        now = self._clock()
        question = approval_queue.Question(
            question_id=secrets.token_hex(8),
            tool=asked.spec.name,
            arguments=copy.deepcopy(asked.call.arguments),
            scope=state.scope,
            key=asked.key,
            taint=asked.taint,
            asked_at_s=now,
            deadline_s=now + state.policy.approval_s,
        )
        if not self._is_clean:  # of a process that is gone, whose questions nobody waits for
            self._is_clean = True
            await asyncio.to_thread(self._clean)
        asking = approval_queue.Asking(self._folder, question)
        try:
            await asyncio.to_thread(asking.write)
            granted = None
            while granted is None:
                await asyncio.sleep(_LOOK_EVERY_S)
                granted = await asyncio.to_thread(asking.answer)
        finally:
            asking.end()  # not in a thread: it has to be done even when whoever waits is cancelled
        return None if granted else _NO

    def _clean(self) -> None:
        approval_queue.withdraw(self._folder, approval_queue.left_over(self._folder))


class _Functions:
    """The user's functions, loaded once each, called in threads that a function which hangs does not share."""

    def __init__(self) -> None:
        self._loaded: dict[str, Approve] = {}
        self._loading = threading.Lock()
        self._free = asyncio.Semaphore(_MOST_AT_ONCE)

    async def ask(self, target: str, asked: Asked, state: EpisodeState) -> Denial | None:
        """Raises as `Approvals.decide`, and TimeoutError of its own only where the function does."""
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        arguments, episode = copy.deepcopy(asked.call.arguments), state.scope.partition("#")[0]

        def call() -> bool:
            return self._load(target)(asked.spec.name, arguments, episode) is True

        await self._free.acquire()
        try:
            self._start(call, answer)
        except RuntimeError:  # no thread can be started
            self._free.release()
            raise
        return None if await answer else _NO

    def _load(self, target: str) -> Approve:
        with self._loading:
            if (function := self._loaded.get(target)) is None:
                from headrace.actors.targets import is_target, load_target  # heavy, and seldom needed

                if not is_target(target):
                    raise ConfigError(f"permissions.approvals is {target!r}; write deny, queue or ./file.py:name")
                function, _ = load_target(target)
                if not callable(function) or inspect.iscoroutinefunction(function):
                    raise ConfigError(f"permissions.approvals: {target} must be a plain function")
                self._loaded[target] = function
            return function

    def _start(self, call: Callable[[], bool], answer: "asyncio.Future[bool]") -> None:
        loop = asyncio.get_running_loop()

        def settle(result: bool, error: BaseException | None) -> None:
            self._free.release()
            if answer.done():
                return
            if error is None:
                answer.set_result(result)
            else:
                answer.set_exception(error)

        def run() -> None:
            result, error = False, None
            try:
                result = call()
            except BaseException as raised:  # foreign code: whatever it raises is for whoever asked
                error = raised
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(settle, result, _raisable(error))

        threading.Thread(target=run, name="approval", daemon=True).start()


def _raisable(error: BaseException | None) -> BaseException | None:
    """`error` as a future may hold it, and as no time-out or exit of ours."""
    if error is None or (isinstance(error, Exception) and not isinstance(error, StopIteration | TimeoutError)):
        return error
    return RuntimeError(f"the approving function raised {type(error).__name__}: {error}")
