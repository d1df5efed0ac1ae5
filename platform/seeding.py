"""Seeds from names: independent streams for everything that draws, without a shared generator."""

import hashlib


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed that depends on every part and their order."""
    text = "\x1f".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def nth_seed(seed: int, index: int) -> int:
    """The `index`-th seed of the stream `seed`, 63 bits: one step of a Weyl sequence, cheap enough for every turn."""
    return (seed + (index + 1) * 0x9E3779B97F4A7C15) & 0x7FFFFFFFFFFFFFFF
