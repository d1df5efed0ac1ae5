"""Intervals and p-values over clusters of values.

Episodes of one task are not independent, so whole tasks are drawn, or have their sign flipped, never single episodes.
Every random number comes from the seed that is given: the same values give the same answer.
"""

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

_RESAMPLES = 1000
_FEWEST_CLUSTERS = 2
_EXACT_CLUSTERS = 12
_PERMUTATIONS = 10_000
_ROWS_AT_ONCE = 500
_ROUNDING = 1e-9


class Interval(msgspec.Struct, frozen=True):
    """A mean with its 95 % percentile bootstrap interval.

    The ends are None where there is only one task: it says nothing about others. The interval has no width where all
    tasks agree, which is not certainty.
    """

    mean: float
    low: float | None
    high: float | None

    def __str__(self) -> str:
        ends = "" if self.low is None else f" [{self.low:.3f}, {self.high:.3f}]"
        return f"{self.mean:.3f}{ends}"

    @property
    def ends(self) -> list[float] | None:
        """Both ends as a list, for JSON."""
        return None if self.low is None or self.high is None else [self.low, self.high]


def bootstrap(clusters: Sequence[Sequence[float]], seed: int) -> Interval:
    """The mean over all values, and its percentile interval when whole clusters are drawn with replacement.

    Given the differences of pairs it is the paired bootstrap. Efron and Tibshirani, An Introduction to the Bootstrap,
    1993, section 13.3.

    Raises:
        ValueError: for no clusters, or an empty one.
    """
    if not clusters or not all(clusters):
        raise ValueError("a bootstrap needs at least one value in every cluster")
    sums = np.array([sum(values) for values in clusters])
    sizes = np.array([len(values) for values in clusters])
    mean = float(sums.sum() / sizes.sum())
    if len(clusters) < _FEWEST_CLUSTERS:
        return Interval(mean, None, None)
    random = np.random.default_rng(seed)
    means = np.empty(_RESAMPLES)
    for resample in range(_RESAMPLES):
        drawn = random.integers(0, len(sums), len(sums))
        means[resample] = sums[drawn].sum() / sizes[drawn].sum()
    low, high = np.percentile(means, [2.5, 97.5])
    return Interval(mean, float(low), float(high))


def sign_flip_p(clusters: Sequence[Sequence[float]], seed: int) -> float:
    """The two-sided p-value of "the differences in `clusters` are as likely to be of either sign".

    The statistic is the absolute sum of all differences; under the hypothesis the sign of each cluster's sum is a coin.
    Exact over all signs for up to 12 clusters that are not zero, else from 10 000 seeded draws, counting the observed
    one (Phipson and Smyth, Permutation p-values should never be zero, 2010).
    """
    sums = np.array([total for values in clusters if abs(total := sum(values)) > _ROUNDING])
    if not len(sums):
        return 1.0
    observed = abs(sums.sum()) - _ROUNDING
    if len(sums) <= _EXACT_CLUSTERS:
        numbers = np.arange(2 ** len(sums))[:, None]
        return float((_flipped(sums, (numbers >> np.arange(len(sums))) & 1) >= observed).mean())
    random = np.random.default_rng(seed)
    as_large = 0
    for _ in range(_PERMUTATIONS // _ROWS_AT_ONCE):
        coins = random.integers(0, 2, (_ROWS_AT_ONCE, len(sums)), dtype=np.int8)
        as_large += int((_flipped(sums, coins) >= observed).sum())
    return (as_large + 1) / (_PERMUTATIONS + 1)


def _flipped(sums: npt.NDArray[np.float64], coins: npt.NDArray[np.integer]) -> npt.NDArray[np.float64]:
    """The statistic for each row of coins; a 1 flips."""
    statistic: npt.NDArray[np.float64] = np.abs((1 - 2 * coins) @ sums)
    return statistic
