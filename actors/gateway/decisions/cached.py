"""What was computed once for an object and is found again by that very object: policies and tools live as long as their
sessions, and hashing one for each call would cost more than all decisions."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")
_MOST = 4096


class PerObjects(Generic[T]):
    """Remembers `make(*objects)`, and holds on to the objects, so that an identity is never taken for another's.

    Forgets everything when it is full; what it held is made again.
    """

    def __init__(self, make: Callable[..., T]) -> None:
        self._make = make
        self._made: dict[int | tuple[int, ...], tuple[tuple[Any, ...], T]] = {}

    def of(self, *objects: Any) -> T:
        """What was made of these objects. Raises what making it raises, which is not remembered."""
        identity = id(objects[0]) if len(objects) == 1 else tuple(map(id, objects))
        if (found := self._made.get(identity)) is not None:
            return found[1]
        if len(self._made) >= _MOST:
            self._made.clear()
        made = self._make(*objects)
        self._made[identity] = (objects, made)
        return made
