"""Two small files of a run root through which a command asks a run for more or fewer replicas, and hears back.

`control/pool.json` is the newest request, written by whoever asks; `control/pool.state.json` is what the pool is like
and what became of the last request, written by the driver. Each has one writer and is replaced whole. They work on any
run root, from any host.
"""

import secrets
import time
from collections.abc import Callable

import msgspec

from headrace.platform.errors import DeadlineExceeded, NotFound, RunFailed
from headrace.platform.store.files import is_local, open_url, write_atomic

_REQUEST, _STATE = "control/pool.json", "control/pool.state.json"
_POLL_S = 0.2


class PoolRequest(msgspec.Struct, frozen=True, kw_only=True):
    """So many replicas, please. `id` names the request."""

    id: str
    replicas: int


class PoolReplica(msgspec.Struct, frozen=True, kw_only=True):
    """One replica: what it holds, oldest first, the sessions that use it, and whether it takes no new ones."""

    name: str
    versions: tuple[int, ...] = ()
    sessions: int = 0
    running: int = 0
    is_draining: bool = False
    held: tuple[int, ...] = ()


class PoolState(msgspec.Struct, frozen=True, kw_only=True):
    """The pool as its driver sees it. `handled` is the id of the last request that is over, `was` the number of
    replicas before it, and `error` why it failed, empty when it did not."""

    replicas: tuple[PoolReplica, ...] = ()
    handled: str = ""
    was: int = 0
    error: str = ""


class PoolControl:
    """The two files of one run root."""

    def __init__(self, root_url: str) -> None:
        self._fs, self._root = open_url(root_url)

    @property
    def is_local(self) -> bool:
        """Whether looking costs nothing."""
        return is_local(self._fs)

    def forget(self) -> None:
        """A driver begins: what was asked and said in an earlier life of the run is over."""
        for name in (_REQUEST, _STATE):
            if self._read(name) is not None:
                self._fs.rm_file(f"{self._root}/{name}")

    def ask(self, replicas: int) -> PoolRequest:
        """Write a request down; it takes the place of one that nobody has seen yet."""
        request = PoolRequest(id=secrets.token_hex(6), replicas=replicas)
        self._write(request)
        return request

    def _write(self, request: PoolRequest) -> None:
        write_atomic(self._fs, f"{self._root}/{_REQUEST}", msgspec.json.encode(request))

    def request(self) -> PoolRequest | None:
        """The newest request, None when there was none."""
        data = self._read(_REQUEST)
        return msgspec.json.decode(data, type=PoolRequest) if data is not None else None

    def tell(self, state: PoolState) -> None:
        """Replace the state."""
        write_atomic(self._fs, f"{self._root}/{_STATE}", msgspec.json.encode(state), durable=False)

    def state(self) -> PoolState:
        """The state as it was told last. Raises NotFound when the run's driver has told nothing yet."""
        state = self._state()
        if state is None:
            raise NotFound("the run has said nothing of its pool: it is starting, or its parts are one process")
        return state

    def _state(self) -> PoolState | None:
        data = self._read(_STATE)
        return msgspec.json.decode(data, type=PoolState) if data is not None else None

    def wait(self, request: PoolRequest, deadline_s: float, is_running: Callable[[], bool]) -> PoolState:
        """Wait until a request is over; the state then.

        Raises:
            RunFailed: it could not be done, another one took its place, or the run ended meanwhile.
            DeadlineExceeded: it takes longer; it goes on.
        """
        until_s = time.monotonic() + deadline_s
        while time.monotonic() < until_s:
            state = self._state()
            if state is not None and state.handled == request.id:
                if state.error:
                    raise RunFailed(state.error)
                return state
            if not is_running():
                raise RunFailed("the run ended before its pool was scaled")
            newest = self.request()
            if newest is None:  # the run has just been resumed, and forgot it with the old ones
                self._write(request)
            elif newest.id != request.id and state is not None and state.handled == newest.id:
                raise RunFailed(f"another request, for {newest.replicas} replicas, came after it and took its place")
            time.sleep(_POLL_S)
        raise DeadlineExceeded(
            f"the pool was not scaled to {request.replicas} replicas within {deadline_s:g} s; the run goes on with it"
        )

    def _read(self, name: str) -> bytes | None:
        self._fs.invalidate_cache()
        try:
            return bytes(self._fs.cat_file(f"{self._root}/{name}"))
        except FileNotFoundError:
            return None
