"""Tasks that a function makes from a seed: `f(seed, **args) -> dict`, one row a call.

The function must depend on its arguments alone: the same seed is asked for again by retries, evaluations and resumed
runs. Without ranges of its own each split draws seeds that no other split has, and takes of what the function makes
only the rows whose content belongs to it, by the same hash that divides files. So no task is in two splits, however
few the function knows; a split with a share of 0.1 calls it about ten times a task. Where every split has an explicit
range, each seed of it is played once an epoch, and the ranges alone keep the splits apart (see `check_ranges`).

A row may have an `id`, a text or a whole number. What it names is not remembered, so a task's id is the row's with a
hash of the content behind it: two tasks with one id stay two. A task's seed is the one that the function was called
with; a row may repeat it as its `seed`, and may have no other.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from headrace.actors.tasks.finite import ID_DIGITS, epoch_order
from headrace.actors.tasks.rows import checked_id, content_digest
from headrace.actors.tasks.sequence import TaskSequence
from headrace.actors.tasks.values import plain
from headrace.platform.errors import ConfigError
from headrace.platform.records.message import Task
from headrace.platform.seeding import FIRST_SPLIT_SEED, derive_seed, split_seed

_TRIED = 4  # positions
_MOST_DRAWS = 2000
_CHECKED_SEEDS = 2000


@dataclass(frozen=True, kw_only=True, slots=True)
class Maker:
    """A function of a seed that makes rows.

    `generate` raises ConfigError that names the user's file and line. `content` picks what of a row makes it the same
    task as another. `seed_bits`, at most 63, is how long a seed the function takes.
    """

    generate: Callable[[int], object]
    content: Callable[[dict[str, Any]], dict[str, Any]] = lambda row: row
    seed_bits: int = 63

    def row(self, seed: int) -> dict[str, Any]:
        """The plain row of a seed. Raises ConfigError."""
        row = self.generate(seed)
        if not isinstance(row, Mapping):
            raise ConfigError(f"the generator returned {type(row).__name__} for the seed {seed}; a task is a dict")
        try:
            made: dict[str, Any] = plain(row)
        except ValueError as error:
            raise ConfigError(f"what the generator returned for the seed {seed} cannot be a task: {error}") from None
        if made.get("seed") not in (None, seed):
            raise ConfigError(
                f"the generator returned the seed {made['seed']!r} for the seed {seed}; a task is played with the seed"
                " that its generator is called with: give that one, or call the column something else"
            )
        if "id" in made:
            checked_id(made["id"], f"the generator, seed {seed}")
        return made

    def digest(self, row: dict[str, Any]) -> bytes:
        """`content_digest` of what counts."""
        return content_digest(self.content(row))


class GeneratedTasks(TaskSequence):
    """A `TaskSource` out of a maker; endless unless it has a limit.

    Args:
        accepts: whether this split may have the content with this digest.
        seeds: half-open range of seeds to play; None draws them from the split's own.
        limit: how many different positions there are, in a new order each epoch; 0 for no end.

    Raises:
        ConfigError: when there is no first task.
    """

    def __init__(
        self,
        maker: Maker,
        split: str,
        seed: int,
        environment: str,
        accepts: Callable[[bytes], bool],
        *,
        seeds: tuple[int, int] | None = None,
        limit: int = 0,
    ) -> None:
        super().__init__(split, seed, environment)
        self._maker = maker
        self._accepts = accepts
        self._seeds = seeds
        self._limit = limit
        self._try()

    def __len__(self) -> int:
        """How many positions there are before it begins anew. Raises TypeError when it has no end."""
        if self._seeds is None and not self._limit:
            raise TypeError("a generator of tasks has no length unless it has a limit or a range of seeds")
        span = self._limit if self._seeds is None else self._seeds[1] - self._seeds[0]
        return min(span, self._limit or span)

    def _try(self) -> None:
        """Find a function that cannot work before anything starts; one that fails now and then may."""
        for position in range(_TRIED):
            try:
                self._at(position)
                return
            except ConfigError:
                if position == _TRIED - 1:
                    raise

    def _at(self, position: int) -> Task:
        if self._limit:
            epoch, place = divmod(position, self._limit)
            position = int(epoch_order(self._seed, self._split, epoch, self._limit)[place])
        failure: ConfigError | None = None
        for draw in range(_MOST_DRAWS):
            seed = self._seed_of(position, draw)
            try:
                row = self._maker.row(seed)
            except ConfigError as error:
                failure = error
                # Without a content the seed decides whose failure this is: no split has more than its share.
                if self._accepts(content_digest({"seed": seed})):
                    raise
                continue
            digest = self._maker.digest(row)
            if self._accepts(digest):
                content = digest.hex()[:ID_DIGITS]
                return Task(
                    task_id=f"{row['id']}-{content}" if "id" in row else content,
                    environment=self._environment,
                    data=row,
                    version=digest.hex(),
                    split=self._split,
                    seed=seed or split_seed(self._split, "zero"),  # a task's seed 0 would mean that it has none
                )
        raise failure or ConfigError(
            f"the generator of {self._environment} made no task of the split {self._split!r} in {_MOST_DRAWS} calls:"
            " it knows too few different ones, or does not use its seed"
        )

    def _seed_of(self, position: int, draw: int) -> int:
        if self._seeds is None:
            return split_seed(self._split, "task", self._seed, position, draw) >> (63 - self._maker.seed_bits)
        return nth_of_range(self._seeds, self._seed, self._split, position + draw)


def nth_of_range(seeds: tuple[int, int], run_seed: int, split: str, position: int) -> int:
    """The seed at `position`: every one of the range once an epoch, in an order that the run's seed decides.

    It walks the range in steps of a number that has no factor in common with its length; an order in memory would be
    as long as the range.
    """
    first, end = seeds
    size = end - first
    epoch, place = divmod(position, size)
    start = derive_seed("start", run_seed, split, epoch) % size
    step = derive_seed("step", run_seed, split, epoch) % size
    while math.gcd(step, size) != 1:
        step += 1
    return first + (start + place * step) % size


def check_ranges(makers: Mapping[str, Maker], ranges: Mapping[str, tuple[int, int]]) -> None:
    """Refuse explicit ranges, by split, that reach into the seeds of the splits or whose tasks are the same.

    Contents are compared where the ranges have no more than 2000 seeds together; beyond that the seeds alone keep the
    splits apart.

    Raises:
        ConfigError: names the range, or an example seed of each split.
    """
    for split, (first, end) in ranges.items():
        if end > FIRST_SPLIT_SEED:
            raise ConfigError(f"tasks.seeds.{split}=[{first}, {end}] reaches beyond 2**61; use smaller seeds")
    if len(ranges) < 2 or sum(end - first for first, end in ranges.values()) > _CHECKED_SEEDS:
        return
    owners: dict[bytes, tuple[str, int]] = {}
    for split, (first, end) in ranges.items():
        maker = makers[split]
        for seed in range(first, end):
            other, example = owners.setdefault(maker.digest(maker.row(seed)), (split, seed))
            if other != split:
                raise ConfigError(
                    f"the generator makes the same task from seed {example} of {other} and from seed {seed} of {split}:"
                    " evaluation must not see what was trained on. Leave tasks.seeds out: then tasks are divided by"
                    " their content"
                )
