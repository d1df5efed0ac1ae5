"""Which split a row belongs to, and that no two splits share a task or a seed (case V2).

A share is decided by a hash of the row's content, so it stays when rows are added or put in another order.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.actors.tasks.rows import DIGEST_BYTES, Rows
from headrace.platform.config.tasks import SPLITS
from headrace.platform.errors import ConfigError

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Shares:
    """How much of a source is held out. What is left is for training."""

    dev: float
    hidden: float

    def split_of(self, digest: bytes) -> str:
        """The split that owns the content with this digest."""
        point = int.from_bytes(digest[:8], "little") / 2.0**64
        return SPLITS[2] if point < self.hidden else SPLITS[1] if point < self.hidden + self.dev else SPLITS[0]

    def divide(self, rows: Rows) -> dict[str, npt.NDArray[np.int64]]:
        """The indices of each split's rows, i64[rows of the split], ascending.

        A source so small that no row falls into a share gives the row that comes closest, with a warning: such a
        split is not stable when rows are added.
        """
        words = np.frombuffer(rows.digests, "<u8")[:: DIGEST_BYTES // 8]
        numbers = self._numbers(words)
        for number, share in ((2, self.hidden), (1, self.dev)):
            if share > 0 and not np.any(numbers == number) and np.count_nonzero(numbers == 0) > 1:
                nearest = int(np.argmin(np.where(numbers == 0, words, np.iinfo(np.uint64).max)))
                numbers[nearest] = number
                _log.warning("%s: one of %d rows is held out as %s", rows.where(0), len(rows), SPLITS[number])
        return {split: np.flatnonzero(numbers == number) for number, split in enumerate(SPLITS)}

    def _numbers(self, words: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        """The split's number in SPLITS for each first word of a digest."""
        points = words / 2.0**64
        return np.where(points < self.hidden, 2, np.where(points < self.hidden + self.dev, 1, 0))


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """The rows of one split: `rows[i]` for each i of `indices`, i64[N]."""

    rows: Rows
    indices: npt.NDArray[np.int64]

    def digests(self) -> frozenset[bytes]:
        """The contents of these rows."""
        return frozenset(self.rows.digest(int(index)) for index in self.indices)


def check_apart(parts: Mapping[str, Part]) -> None:
    """Refuse splits that share a task or a seed.

    Raises:
        ConfigError: names an example row of both.
    """
    _check_contents(parts)
    seeds: dict[int, tuple[str, str]] = {}
    for split, part in parts.items():
        for index in part.indices:
            seed = part.rows.seed(int(index))
            if seed is None:
                continue
            where = part.rows.where(int(index))
            other, example = seeds.setdefault(seed, (split, where))
            if other != split:
                raise ConfigError(
                    f"{where} of {split} and {example} of {other} have the same seed {seed}: evaluation must not see"
                    " the worlds of training; give each split seeds of its own"
                )


def _check_contents(parts: Mapping[str, Part]) -> None:
    named = [(split, part) for split, part in parts.items() if len(part.indices)]
    if len({id(part.rows) for _, part in named}) < 2:
        return  # one source: a content has one split
    owners: dict[bytes, tuple[str, Rows, int]] = {}
    for split, part in sorted(named, key=lambda each: len(each[1].indices)):
        for index in map(int, part.indices):
            other, rows, row = owners.setdefault(part.rows.digest(index), (split, part.rows, index))
            if other != split:
                raise ConfigError(
                    f"{part.rows.where(index)} of {split} is the same task as {rows.where(row)} of {other}"
                    f" ({rows[row]!r:.120}): remove it from one of them, so that evaluation does not see what was"
                    " trained on"
                )


def require(split: str, part: Part, names: Sequence[str]) -> None:
    """Raise ConfigError that says what to do where a split has no rows."""
    if not len(part.indices):
        more = "more rows" if split == "train" else f"tasks.{split}_share, or a source of its own as tasks.{split}"
        raise ConfigError(
            f"none of the {len(part.rows)} rows of {', '.join(names)} is in the split {split!r}; give {more}"
        )
