"""Which environment a group plays, and where in that environment's tasks it stands: a pure function of its number.

Groups come in blocks. Every block gives each environment the same number of groups, exactly its share up to rounding
(largest remainder, at least one each). As an environment counts its own groups only, a mixture walks through each
one's tasks without gaps, epoch by epoch.

Training plays a block in a shuffled order. Evaluation takes the first few groups and no more, so its order is smooth:
the first groups play every environment once in turn, however small its weight; from then on every beginning has the
shares within one, as soon as the environments that were put back by the first round have caught up.
"""

import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from headrace.platform.seeding import derive_seed

BLOCK = 1000
"""Groups in a block; more, one each, where there are more environments."""


class Mixture:
    """Environments by weight.

    Args:
        weights: of each environment, all above 0.
        seed, split: decide the order within the blocks; that of "dev" and "hidden" is the same for every seed.
    """

    def __init__(self, weights: Sequence[float], seed: int, split: str) -> None:
        self.counts = shares_of(weights, max(BLOCK, len(weights)))
        self._seed = seed
        self._split = split

    def place(self, group: int) -> tuple[int, int]:
        """The number of the environment that `group` plays, and the group's position among its own."""
        if len(self.counts) == 1:
            return 0, group
        block, offset = divmod(group, sum(self.counts))
        is_shuffled = self._split == "train"
        environments, ranks = _shuffled(self._seed, block, self.counts) if is_shuffled else _smooth(block, self.counts)
        environment = int(environments[offset])
        return environment, block * self.counts[environment] + int(ranks[offset])


def shares_of(weights: Sequence[float], size: int) -> tuple[int, ...]:
    """Whole numbers that add up to `size` and are as close to the weights as rounding allows, each at least 1."""
    total = sum(weights)
    exact = [size * weight / total for weight in weights]
    counts = [max(1, int(share)) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda index: exact[index] - counts[index], reverse=True)
    while (missing := size - sum(counts)) > 0:
        for index in by_remainder[:missing]:
            counts[index] += 1
    while sum(counts) > size:  # the ones that were given to tiny weights are taken from the most overdrawn
        most = max((i for i, count in enumerate(counts) if count > 1), key=lambda index: counts[index] - exact[index])
        counts[most] -= 1
    return tuple(counts)


@functools.lru_cache(maxsize=8)
def _shuffled(seed: int, block: int, counts: tuple[int, ...]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The environment of each group of a block, and its rank among the block's groups of that environment."""
    derived = derive_seed("mix", seed, "train", block)
    generator = np.random.RandomState(np.random.MT19937(np.random.SeedSequence(derived)))
    order = generator.permutation(np.repeat(np.arange(len(counts)), counts))
    return order, _ranks(order, len(counts))


@functools.lru_cache(maxsize=8)
def _smooth(block: int, counts: tuple[int, ...]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The same in the smooth order; only the very first block begins with a round.

    Of the environments that are below their share, the one plays whose share is due first (the quota method of
    Balinski and Young, 1975): nobody is ever a whole group ahead or behind.
    """
    size = sum(counts)
    order = list(range(len(counts))) if block == 0 else []
    given = [order.count(environment) for environment in range(len(counts))]
    for place in range(len(order) + 1, size + 1):
        below = (environment for environment, count in enumerate(counts) if given[environment] * size < count * place)
        chosen = min(below, key=lambda environment: (given[environment] + 1) / counts[environment])
        given[chosen] += 1
        order.append(chosen)
    placed = np.array(order)
    return placed, _ranks(placed, len(counts))


def _ranks(order: npt.NDArray[np.int64], environments: int) -> npt.NDArray[np.int64]:
    ranks = np.empty_like(order)
    for environment in range(environments):
        mask = order == environment
        ranks[mask] = np.arange(np.count_nonzero(mask))
    return ranks
