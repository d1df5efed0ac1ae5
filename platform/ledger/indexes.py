"""Small indexes over group numbers: by order, by key, by time. No step of the ledger looks at all of its groups.

They hold numbers only; what a number means is the business of `books.py`.
"""

import heapq
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Ordered:
    """Numbers in ascending order, each once."""

    def __init__(self) -> None:
        self._numbers: list[int] = []

    def add(self, number: int) -> None:
        """Take up a number that is not here yet."""
        self._numbers.insert(bisect_left(self._numbers, number), number)

    def remove(self, number: int) -> None:
        """Take out a number that is here."""
        del self._numbers[bisect_left(self._numbers, number)]

    def first(self, count: int) -> list[int]:
        """The `count` lowest numbers, or all when there are fewer."""
        return self._numbers[:count]

    def __iter__(self) -> Iterator[int]:
        """Over a copy: the loop may move what it meets."""
        return iter(self._numbers.copy())

    def __len__(self) -> int:
        return len(self._numbers)


class Buckets(Generic[K]):
    """Sets of numbers by key; an empty one is not kept."""

    def __init__(self) -> None:
        self._sets: dict[K, set[int]] = {}

    def add(self, key: K, number: int) -> None:
        """Put a number under `key`."""
        self._sets.setdefault(key, set()).add(number)

    def remove(self, key: K, number: int) -> None:
        """Take a number that is under `key` from there."""
        self._sets[key].remove(number)
        if not self._sets[key]:
            del self._sets[key]

    def under(self, key: K) -> list[int]:
        """The numbers under `key`, in ascending order."""
        return sorted(self._sets.get(key, ()))

    def where(self, matches: Callable[[K], bool]) -> list[int]:
        """The numbers under any key that `matches`, in ascending order, each once."""
        return sorted(set().union(*(numbers for key, numbers in self._sets.items() if matches(key))))

    def __len__(self) -> int:
        """How many numbers there are, for numbers that are under one key each."""
        return sum(map(len, self._sets.values()))


class Timers:
    """A time for each number, in seconds; a renewed one costs nothing until its old time has come."""

    def __init__(self) -> None:
        self._due_s: dict[int, float] = {}
        self._heap: list[tuple[float, int]] = []

    def set(self, number: int, due_s: float) -> None:
        """Start or move the timer of `number`."""
        before_s = self._due_s.get(number)
        self._due_s[number] = due_s
        if before_s is None or due_s < before_s:
            heapq.heappush(self._heap, (due_s, number))

    def stop(self, number: int) -> None:
        """Forget the timer of `number`, if it has one."""
        self._due_s.pop(number, None)

    def over(self, now_s: float) -> list[int]:
        """Take out every number whose time has come, in ascending order."""
        found = []
        while self._heap and self._heap[0][0] <= now_s:
            _, number = heapq.heappop(self._heap)
            due_s = self._due_s.get(number)
            if due_s is None:
                continue
            if due_s > now_s:
                heapq.heappush(self._heap, (due_s, number))
            else:
                del self._due_s[number]
                found.append(number)
        return sorted(found)
