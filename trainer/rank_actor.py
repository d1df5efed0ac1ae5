"""One rank of a learner in a Ray actor, and all of them as `Ranks`.

Whoever opens the ranks owns them: they end with it, whatever becomes of it.
"""

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import ray
from ray.exceptions import ObjectLostError, RayActorError, RayError, RayTaskError

from headrace.platform.errors import PartDied

_CAUSE_LENGTH = 240


class _RankActor:
    """The shell around one rank: what a learner calls is done in the order of the calls."""

    _store: Any = None

    def listen(self, address: str, world_size: int, deadline_s: float) -> tuple[str, int]:
        """Be where the ranks meet: rank 0 alone is asked. `address` is this node's where it is empty."""
        from headrace.trainer.ranks import meeting_place

        host = address or str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        self._store = meeting_place(host, world_size, deadline_s)
        return host, int(self._store.port)

    def build(self, make: Callable[[Any], Any]) -> None:
        """Build the rank; `make` is given the store, on rank 0."""
        self._rank = make(self._store)

    def ask(self, method: str, *arguments: Any) -> Any:
        """What that method of the rank returns."""
        return getattr(self._rank, method)(*arguments)


RankActor: Any = ray.remote(_RankActor)


class RayRanks:
    """`Ranks` over actors whose ranks are built."""

    def __init__(self, handles: Sequence[Any]) -> None:
        self.handles = handles
        self.size = len(handles)

    def ask(self, method: str, *arguments: Any) -> list[Future[Any]]:
        """See `Ranks.ask`. The arguments are stored once, whatever the number of ranks."""
        stored = [ray.put(argument) for argument in arguments]
        return [_named(handle.ask.remote(method, *stored).future()) for handle in self.handles]

    def end(self) -> None:
        """See `Ranks.end`."""
        for handle in self.handles:
            with contextlib.suppress(RayError, ValueError):  # where it is gone already
                ray.kill(handle)


def _named(asked: Future[Any]) -> Future[Any]:
    """The same answer, Ray's errors as headrace's or as what the rank raised."""
    told: Future[Any] = Future()

    def tell(answer: Future[Any]) -> None:
        error = answer.exception()
        if error is None:
            told.set_result(answer.result())
        elif isinstance(error, RayTaskError):
            told.set_exception(error.cause)
        elif isinstance(error, RayActorError | ObjectLostError):
            told.set_exception(PartDied(" ".join(str(error).split()).partition(" class_name:")[0][:_CAUSE_LENGTH]))
        else:
            told.set_exception(error)

    asked.add_done_callback(tell)
    return told
