"""Whether long episodes are trained as often as short ones (P16): shares by length decile from a histogram.

Length is time in play, in seconds of the server's clock: the one length that an abandoned attempt has as well. What an
abandoned attempt would have become is longer than what it was, so a falling curve at the long end understates the loss.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

DECILES = 10


@dataclass(frozen=True, slots=True)
class LengthDecile:
    """A tenth of the attempts that ended, by length: from which length on, in seconds, how many ended, and how many of
    them were trained."""

    from_s: float
    ended: float
    trained: float

    @property
    def share(self) -> float:
        """Trained of ended."""
        return self.trained / self.ended if self.ended else 0.0


def bucket_start_s(bucket: int) -> float:
    """The shortest length of a bucket of `LedgerStats.lengths`, in seconds."""
    return float(2.0 ** (bucket / 2))


def length_deciles(lengths: Mapping[str, Mapping[int, int]]) -> list[LengthDecile]:
    """Deciles from counts by kind of fate and bucket, shortest first; empty when nothing has ended.

    A bucket that spans two deciles is divided between them, its trained attempts in proportion.
    """
    ended: Counter[int] = Counter()
    for counts in lengths.values():
        ended.update(counts)
    buckets = sorted(bucket for bucket, count in ended.items() if count > 0)
    if not buckets:
        return []
    trained = lengths.get("trained", {})
    upto = np.cumsum([0, *(ended[bucket] for bucket in buckets)])
    trained_upto = np.cumsum([0, *(trained.get(bucket, 0) for bucket in buckets)])
    edges = np.linspace(0, upto[-1], DECILES + 1)
    trained_at = np.interp(edges, upto, trained_upto)
    starts = np.minimum(np.searchsorted(upto, edges[:-1], side="right") - 1, len(buckets) - 1)
    return [
        LengthDecile(bucket_start_s(buckets[starts[d]]), float(edges[d + 1] - edges[d]), float(gained))
        for d, gained in enumerate(np.diff(trained_at))
    ]
