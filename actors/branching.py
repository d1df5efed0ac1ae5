"""Groups whose members branch off the first one, so that they tell what its steps were worth.

::

    member 0, the trunk ──────────────► its end ─┐
    members of the first point ──► their ends    │   the reset is a point: they need not wait
    members of the other points ··· wait ··· ◄───┘   each begins at a step of the trunk

Points are spread evenly over the steps from which the trunk can go on, the reset first. Who belongs to which point,
and where the points lie, depends on nothing but the member's number and the trunk, so that a retry branches where the
attempt before did.

Nobody waits in vain: where there is no trunk to branch off (its slot ended without a score, or another worker played
it), whoever waited plays from the beginning, as a member of the first point. A member that waits holds its place and
nothing else, and the trunk needs nothing that it holds.
"""

import asyncio
from dataclasses import dataclass

from headrace.actors.plan import PlayedEpisode
from headrace.actors.replaying.branch import Prefix, last_step
from headrace.actors.replaying.execution import actions_of
from headrace.platform.config.algorithm import AlgorithmOptions
from headrace.platform.config.branch import BranchConfig
from headrace.platform.records.episode import Episode

TRUNK = 0
"""The number of the member that the others branch off."""


@dataclass(frozen=True, slots=True)
class Branching:
    """`points` of the trunk, the reset among them, and `continuations` that begin at each: members 1, 2, … in the
    order of the points. With one point all members play from the beginning, and nobody waits."""

    points: int = 1
    continuations: int = 1

    def waits(self, sample: int) -> bool:
        """Whether a member's point is known only when the trunk has ended."""
        return self.points > 1 and sample > self.continuations

    def first_step(self, sample: int, trunk: Episode) -> int:
        """The step of the trunk at which a member begins, 0 for the reset.

        A trunk with fewer steps than points has the continuations of the others spread over those that it has.
        """
        point = (sample - 1) // self.continuations
        steps = max(1, min(last_step(trunk) + 1, len(actions_of(trunk))))
        return point * steps // self.points if steps >= self.points else point % steps


WITHOUT = Branching()
"""Of groups whose members have nothing to do with each other."""


class Branches:
    """The branches of one open group. Whether there is a trunk is settled once."""

    def __init__(self, branching: Branching) -> None:
        self._branching = branching
        self._settled = asyncio.Event()
        self._trunk: Episode | None = None

    def must_wait(self, sample: int) -> bool:
        """Whether the member cannot begin yet."""
        return self._branching.waits(sample) and not self._settled.is_set()

    async def prefix_of(self, sample: int) -> Prefix | None:
        """What a member begins with, as soon as it is known; None for one that plays from the beginning."""
        if not self._branching.waits(sample):
            return None
        await self._settled.wait()
        step = self._branching.first_step(sample, self._trunk) if self._trunk is not None else 0
        return Prefix(self._trunk, step) if self._trunk is not None and step else None

    def ended(self, played: PlayedEpisode) -> None:
        """A member has been played: if it is the trunk and has a score, the others may branch off it. Where it has none
        they go on waiting, for its slot may get another try."""
        if played.episode.attempt_id.sample == TRUNK and played.score is not None:
            self._settle(played.episode)

    def over(self, sample: int) -> None:
        """The slot of a member is played no more here, or never was."""
        if sample == TRUNK:
            self._settle(None)

    def _settle(self, trunk: Episode | None) -> None:
        if not self._settled.is_set():
            self._trunk = trunk
            self._settled.set()


def branching_of(algorithm: AlgorithmOptions) -> Branching:
    """Who branches off whom under an algorithm."""
    return Branching(algorithm.points, algorithm.continuations) if isinstance(algorithm, BranchConfig) else WITHOUT
