"""Which process of a run dies when: drawn from a seed, so that a failure can be played again."""

import random

import msgspec

from headrace.platform.testing.failpoints import FAILPOINTS

PARTS = ("learner", "rollout-0", "replica-0", "server")
GROUP = "group"
"""The driver and everything in its process group; the run is resumed."""
_LONGEST_DELAY_S = 2.0


class Kill(msgspec.Struct, frozen=True, kw_only=True):
    """`kind` is a part, GROUP, or a failpoint; it happens `delay_s` after the run has got going again."""

    kind: str
    delay_s: float


def kill_plan(seed: int, kills: int, *, groups: int) -> list[Kill]:
    """`kills` kills, of which `groups` are of the whole group: every part and every failpoint as often as any other."""
    draw = random.Random(seed)
    kinds = [*PARTS, *FAILPOINTS]
    draw.shuffle(kinds)
    singles = [kinds[n % len(kinds)] for n in range(kills - groups)]
    mixed = [*singles, *[GROUP] * groups]
    draw.shuffle(mixed)
    return [Kill(kind=kind, delay_s=draw.uniform(0.0, _LONGEST_DELAY_S)) for kind in mixed]
