"""The tasks of the lookup world: a chain of keys that ends in a value, drawn by position."""

import random
from collections.abc import Sequence

from headrace.actors.environments.lookup.vocabulary import KEYS, VALUES
from headrace.platform.errors import ConfigError
from headrace.platform.records.message import Task
from headrace.platform.seeding import derive_seed

# Splits differ in the pair (first key, value): no task of one split occurs in another.
_BUCKETS = {"train": range(8), "dev": range(8, 9), "hidden": range(9, 10)}


def split_of(first_key: str, value: str) -> str:
    """The split that owns every chain from `first_key` to `value`."""
    bucket = derive_seed("lookup-split", first_key, value) % 10
    return next(split for split, buckets in _BUCKETS.items() if bucket in buckets)


class LookupTasks:
    """An endless, seeded `TaskSource`.

    Args:
        split: "train", "dev" or "hidden".
        seed: the run's seed.
        hops: the chain lengths to draw from, each 1 or more.

    Raises:
        ConfigError: for an unknown split or impossible hops.
    """

    def __init__(self, split: str, seed: int, hops: Sequence[int] = (1, 2)) -> None:
        if split not in _BUCKETS:
            raise ConfigError(f"lookup has no split {split!r}; known: {', '.join(_BUCKETS)}")
        if not hops or any(not 1 <= hop <= len(KEYS) for hop in hops):
            raise ConfigError(f"lookup: hops must be a list of numbers from 1 to {len(KEYS)}, not {list(hops)}")
        self._split = split
        self._seed = seed
        self._hops = tuple(hops)
        self._position = 0

    @property
    def split(self) -> str:
        """See `TaskSource.split`."""
        return self._split

    @property
    def state(self) -> int:
        """See `TaskSource.state`."""
        return self._position

    def restore(self, state: int) -> None:
        """See `TaskSource.restore`."""
        self._position = state

    def next(self, n: int) -> Sequence[Task]:
        """See `TaskSource.next`."""
        tasks = [self._draw(self._position + offset) for offset in range(n)]
        self._position += n
        return tasks

    def _draw(self, position: int) -> Task:
        rng = random.Random(derive_seed("lookup", self._seed, self._split, position))
        while True:
            chain = rng.sample(KEYS, rng.choice(self._hops))
            value = rng.choice(VALUES)
            if split_of(chain[0], value) == self._split:
                break
        return Task(
            task_id=f"lookup-{self._split}-{position}",
            environment="lookup",
            data={"chain": chain, "answer": value},
            split=self._split,
            seed=derive_seed("lookup-world", self._seed, self._split, position),
        )
