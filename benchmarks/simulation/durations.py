"""How long simulated episodes take: lognormal, from two of its quantiles. All times are seconds."""

import math
import random
from dataclasses import dataclass
from statistics import NormalDist

_NORMAL = NormalDist()


@dataclass(frozen=True, slots=True)
class Durations:
    """Lognormal with this median and this 99th percentile."""

    median_s: float
    p99_s: float

    @property
    def _normal(self) -> NormalDist:
        """Of the logarithm of a duration over the median."""
        ratio = self.p99_s / self.median_s
        return NormalDist(0.0, math.log(ratio) / _NORMAL.inv_cdf(0.99))

    @property
    def mean_s(self) -> float:
        """exp(sigma^2 / 2) medians."""
        return self.median_s * math.exp(self._normal.variance / 2)

    def longer_share(self, limit_s: float) -> float:
        """Share of all time that episodes longer than `limit_s` take: their share of the tokens, too."""
        normal = self._normal
        return _NORMAL.cdf(normal.stdev - math.log(limit_s / self.median_s) / normal.stdev)

    def decile(self, duration_s: float) -> int:
        """0 for the shortest tenth of the episodes, 9 for the longest."""
        return min(int(10 * self._normal.cdf(math.log(duration_s / self.median_s))), 9)

    def draw(self, rng: random.Random) -> float:
        """One duration."""
        return rng.lognormvariate(math.log(self.median_s), self._normal.stdev)
