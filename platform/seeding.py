"""Seeds from names: independent streams for everything that draws, without a shared generator.

The worlds of different splits draw from ranges that do not meet: `split_seed` writes the split into the upper two bits
of the 63. Whoever names seeds by hand (a `seed` column, ranges of a generator) uses those below `FIRST_SPLIT_SEED`.
"""

import hashlib

_SPLIT_BITS = 61
_SPLITS = {"train": 1, "dev": 2, "hidden": 3}
FIRST_SPLIT_SEED = 1 << _SPLIT_BITS


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed that depends on every part and their order."""
    text = "\x1f".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def nth_seed(seed: int, index: int) -> int:
    """The `index`-th seed of the stream `seed`, 63 bits: one step of a Weyl sequence, cheap enough for every turn."""
    return (seed + (index + 1) * 0x9E3779B97F4A7C15) & 0x7FFFFFFFFFFFFFFF


def split_seed(split: str, *parts: int | str) -> int:
    """A 63-bit seed from `parts` that no other split can have (case V2), nor anyone who counts from 0 below 2**61.

    Raises:
        ValueError: for a split that is not "train", "dev" or "hidden".
    """
    if split not in _SPLITS:
        raise ValueError(f"there is no split {split!r}; known: {', '.join(_SPLITS)}")
    return _SPLITS[split] << _SPLIT_BITS | derive_seed(*parts) >> 2
