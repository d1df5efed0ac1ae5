"""The runs of `SHARED` characters that texts have in common, found by number instead of by looking for each.

Owns the filter of an episode: two places in a table for each run of what was shown, so that the usual call, which has
nothing of it, costs a few steps however much was shown. It says no only where that is so; whether a run that it lets
through was shown is for `likeness` to look at. A text is added once, and looked at when a call is compared. An episode
that was shown so much that its table would be large has none: each part of what it was shown has an index of hashes,
and those of all episodes together have bounded room.
"""

import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

SHARED = 8
"""Characters in a row that make a text another's."""
BETWEEN = "\0"
"""Between two texts in one: no run spans it."""
_FIRST_BITS, _MOST_BITS = 13, 19
_FULL = 4  # one in so many places may be taken; after growing, one in twice as many
_SPREAD = np.uint64(0x9E3779B97F4A7C15)


class Runs:
    """A filter of the runs of `parts`, normal texts with their sources, which grow and are dropped as time goes by."""

    __slots__ = ("_bits", "_mask", "_new", "_parts", "_shifts", "_table")

    def __init__(self, parts: Sequence[tuple[str, str]]) -> None:
        self._parts = parts
        self._bits = _FIRST_BITS
        self._new: list[str] = []
        self._table: npt.NDArray[np.bool_] | None = None
        self._build()

    def add(self, text: str) -> None:
        """A text is in `parts` that was not there before."""
        if self._table is not None:
            self._new.append(text)

    def suspects(self, text: str) -> list[str]:
        """The runs of `text` that may be in `parts`, each once."""
        if self._new and self._table is not None:
            new, self._new = self._new, []
            self._take(new, self._table)
            if _is_full(self._table, _FULL):
                self._build()
        numbers = _numbers(text)
        if numbers is None:
            return []
        if self._table is None:
            hashes = _hashes(text)
            places = functools.reduce(
                np.logical_or, [_among(hashes, _index(part)) for part, _ in self._parts]
            ).nonzero()[0]
        else:
            one, other = self._table.take(self._places(numbers))
            places = (one & other).nonzero()[0]
        if not len(places):
            return []
        return list(dict.fromkeys([text[place : place + SHARED] for place in places.tolist()]))

    def _build(self) -> None:
        """Make the table anew from what there is, larger until it has room; none where it would be too large."""
        self._table = None
        while self._bits <= _MOST_BITS:
            table = np.zeros(1 << self._bits, np.bool_)
            self._shifts = np.array([[64 - self._bits], [64 - 2 * self._bits]], np.uint64)
            self._mask = np.uint64((1 << self._bits) - 1)
            self._take([part for part, _ in self._parts], table)
            if not _is_full(table, 2 * _FULL):
                self._table = table
                return
            self._bits += 1

    def _take(self, texts: Sequence[str], table: npt.NDArray[np.bool_]) -> None:
        numbers = _numbers(BETWEEN.join(texts))
        if numbers is not None:
            table[self._places(numbers)] = True

    def _places(self, numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        """The two places of each run, i64[2, N]."""
        places = (numbers * _SPREAD) >> self._shifts
        places &= self._mask
        return places.view(np.int64)


def _numbers(text: str) -> npt.NDArray[np.uint64] | None:
    """One for each run, u64[len(text) - SHARED + 1]; None where there is none. Of ASCII it is the run itself; of other
    characters different ones may have the same."""
    if len(text) < SHARED:
        return None
    if text.isascii():
        data = text.encode()
    else:
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")
        data = np.where(codes < 128, codes, codes % 127 + 128).astype(np.uint8).tobytes()
    return np.ndarray((len(data) - SHARED + 1,), "<u8", data, 0, (1,))


def _is_full(table: npt.NDArray[np.bool_], share: int) -> bool:
    return bool(share * np.count_nonzero(table) > len(table))


def held_by(runs: list[str], text: str) -> npt.NDArray[np.bool_]:
    """Which of `runs` a text holds, bool[len(runs)]."""
    return _among(_hashes("".join(runs))[::SHARED], _index(text))


@functools.lru_cache(maxsize=256)
def _index(text: str) -> npt.NDArray[np.uint64]:
    """The hashes of all runs of `SHARED` characters, u64[N], sorted."""
    return np.unique(_hashes(text))


def _hashes(text: str) -> npt.NDArray[np.uint64]:
    """One for each run of `SHARED` characters, u64[len(text) - SHARED + 1]. Equal runs have equal ones; that others do
    too is improbable, and would only taint."""
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4").astype(np.uint64)
    number = max(len(codes) - SHARED + 1, 0)
    hashes = np.zeros(number, np.uint64)
    for offset in range(SHARED):
        hashes = hashes * np.uint64(0x9E3779B97F4A7C15) + codes[offset : offset + number]
    return hashes


def _among(hashes: npt.NDArray[np.uint64], index: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
    """Which of `hashes` are in a sorted `index`, bool[len(hashes)]."""
    if not len(index):
        return np.zeros(len(hashes), np.bool_)
    places = np.minimum(np.searchsorted(index, hashes), len(index) - 1)
    found: npt.NDArray[np.bool_] = index[places] == hashes
    return found
