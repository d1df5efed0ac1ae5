"""The gap between learner and engines: how far apart they find the logprobs of the same tokens.

Both compute log pi(token | context) at the temperature of sampling: the engine when it samples, with the version that
it says it has, and the learner when it trains, before the step. For tokens of the very weights that are about to be
trained (lag 0) the two differ by rounding alone, unless the engine had other weights than it said: it missed an
update, or loaded half of one (case S10). Older tokens differ by what was learnt since, but alike for all replicas of a
version; a single replica that is never at lag 0 cannot be told from one that missed an update.

Owns the measure and the verdict. Pure: no clock, no ledger.
"""

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

FEWEST_TOKENS = 16
"""Of fewer tokens the mean says nothing."""
FEWEST_COMPARED = 256
"""Of fewer tokens the mean says nothing beside that of another replica: episodes differ more than tokens do."""
_TIMES = 3.0  # what a replica's gap may be of the smallest that another one of the same version has


@dataclass(frozen=True, slots=True)
class Source:
    """Tokens `[start, end)` of a sample were sampled by `replica` as `version`."""

    start: int
    end: int
    version: int
    replica: str


class Gap(msgspec.Struct, frozen=True, kw_only=True):
    """Over the loss tokens of one batch that `replica` sampled as `version`: the mean and the largest absolute
    difference of logprobs, in nats, learner against engine, and the mean signed one. `lag` is that of the version."""

    version: int
    replica: str
    lag: int
    tokens: int
    mean: float
    largest: float
    signed: float


class GapAlarm(msgspec.Struct, frozen=True, kw_only=True):
    """`replica` samples with other weights than those of `version`, as it says."""

    version: int
    replica: str
    why: str

    def __str__(self) -> str:
        return f"{self.replica} does not have the weights of version {self.version}, as it says: {self.why}"


def alarms(gaps: Iterable[Gap], limit: float) -> list[GapAlarm]:
    """The gaps that no learning explains.

    Args:
        gaps: of one batch.
        limit: largest mean gap at lag 0 in nats, the rounding of engine and learner included.
    """
    by_version: dict[int, list[Gap]] = defaultdict(list)
    for gap in gaps:
        if gap.tokens >= FEWEST_TOKENS:
            by_version[gap.version].append(gap)
    found: list[GapAlarm] = []
    for version in sorted(by_version):
        compared = [gap.mean for gap in by_version[version] if gap.tokens >= FEWEST_COMPARED]
        least = min(compared, default=math.inf)
        for gap in by_version[version]:
            if why := _why(gap, least, limit):
                found.append(GapAlarm(version=version, replica=gap.replica, why=why))
    return found


def _why(gap: Gap, least: float, limit: float) -> str:
    if gap.lag == 0 and gap.mean > limit:
        return f"its logprobs are {gap.mean:.3g} nats from the learner's of the same weights (limit {limit:g})"
    if gap.tokens >= FEWEST_COMPARED and gap.mean > limit + _TIMES * least:
        return f"its logprobs are {gap.mean:.3g} nats from the learner's, those of another replica {least:.3g}"
    return ""
