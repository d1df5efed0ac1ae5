"""The groups that a worker has open, their slots, and the tasks that play them.

A slot takes a place from its admission until the ledger has answered for its last attempt: finished episodes that
wait for their delivery count (case Q14). A group is forgotten with its last slot. Two ways lead to an early end:

- `cancel`: the attempts end, and the ledger must be told.
- `abandon`: the ledger has given the group to another, or closed it; what plays ends, and nobody is told (P12).

Owns no connection: what has ended is handed to `on_end`, and the worker delivers it.
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, NamedTuple

from headrace.actors.branching import TRUNK, WITHOUT, Branches, Branching
from headrace.actors.plan import PlayedEpisode
from headrace.actors.player import Place
from headrace.platform.records.delivery import GroupTicket
from headrace.platform.records.ids import AttemptId
from headrace.platform.records.status import CancelReason


class Cancelled(NamedTuple):
    """An attempt that was stopped before its end, which the ledger does not know yet."""

    attempt_id: AttemptId
    reason: CancelReason


Ended = PlayedEpisode | Cancelled


@dataclass(slots=True, eq=False)
class OpenGroup:
    """A group that is played here. Since `leased_s`, on this process's monotonic clock, its dispatch lease has run:
    the call that granted it was sent then, so that the ledger's clock for it began no earlier."""

    ticket: GroupTicket
    place: Place
    leased_s: float
    slots_left: int
    branches: Branches
    abandoned: bool = False


class Attempts:
    """Slots and tasks. Everything happens on one event loop; no method but `stop` waits.

    Args:
        run: the run's name.
        play: plays one attempt; raises nothing but its cancellation.
        on_end: takes what has ended.
        branching: who begins where; see there.
    """

    def __init__(
        self,
        run: str,
        play: Callable[[AttemptId, OpenGroup], Coroutine[Any, Any, PlayedEpisode]],
        on_end: Callable[[Ended], None],
        branching: Branching = WITHOUT,
    ) -> None:
        self._run = run
        self._branching = branching
        self._play = play
        self._on_end = on_end
        self._groups: dict[int, OpenGroup] = {}
        self._group_of: dict[AttemptId, OpenGroup] = {}
        self._tasks: dict[AttemptId, asyncio.Task[PlayedEpisode]] = {}
        self._reasons: dict[AttemptId, CancelReason] = {}
        self.broken: BaseException | None = None
        """What ended an attempt outside of its episode."""

    @property
    def places(self) -> int:
        """How many slots are played, or wait for their delivery."""
        return len(self._group_of)

    @property
    def running(self) -> int:
        """How many attempts are played now."""
        return len(self._tasks)

    @property
    def groups(self) -> dict[int, OpenGroup]:
        """The groups whose leases are ours to renew, by number."""
        return dict(self._groups)

    def group_of(self, attempt_id: AttemptId) -> OpenGroup:
        """The group of a slot's present attempt. Raises KeyError when the slot is over."""
        return self._group_of[attempt_id]

    def must_wait(self, attempt_id: AttemptId) -> bool:
        """Whether an attempt cannot begin before another of its group has ended."""
        return self._group_of[attempt_id].branches.must_wait(attempt_id.sample)

    def open(self, ticket: GroupTicket, place: Place, leased_s: float) -> list[AttemptId]:
        """Take up a group; the attempts to play. One that is still open here was lost to us and given out again."""
        if (before := self._groups.get(ticket.group)) is not None:
            self.abandon(before)
        branches = Branches(self._branching)
        group = self._groups[ticket.group] = OpenGroup(ticket, place, leased_s, len(ticket.attempts), branches)
        if all(sample != TRUNK for sample, _ in ticket.attempts):  # its worker is gone, and it had been put
            branches.over(TRUNK)
        attempts = [AttemptId(self._run, ticket.group, sample, attempt) for sample, attempt in ticket.attempts]
        self._group_of.update(dict.fromkeys(attempts, group))
        return attempts

    def spawn(self, attempt_id: AttemptId) -> None:
        """Play an attempt of an open slot in a task of its own."""
        task = asyncio.create_task(self._play(attempt_id, self._group_of[attempt_id]), name=str(attempt_id))
        self._tasks[attempt_id] = task
        task.add_done_callback(lambda task: self._ended(attempt_id, task))

    def follow(self, attempt_id: AttemptId, number: int) -> AttemptId | None:
        """The next attempt of the slot, to be played; None where the group is not ours any more."""
        group = self._group_of[attempt_id]
        if group.abandoned:
            self.over(attempt_id)
            return None
        del self._group_of[attempt_id]
        follower = AttemptId(self._run, attempt_id.group, attempt_id.sample, number)
        self._group_of[follower] = group
        return follower

    def over(self, attempt_id: AttemptId) -> None:
        """The slot plays no more."""
        group = self._group_of.pop(attempt_id)
        group.slots_left -= 1
        group.branches.over(attempt_id.sample)
        if group.slots_left == 0 and self._groups.get(group.ticket.group) is group:
            del self._groups[group.ticket.group]

    def cancel(self, group: OpenGroup, reason: CancelReason) -> int:
        """End what is played of a group, for the ledger to be told; how many attempts."""
        return self._cancel([each for each in self._tasks if self._group_of[each] is group], reason)

    def abandon(self, group: OpenGroup) -> int:
        """End what is played of a group that is not ours any more; how many attempts. What has been played to its end
        is still delivered: the ledger decides (P2)."""
        group.abandoned = True
        if self._groups.get(group.ticket.group) is group:
            del self._groups[group.ticket.group]
        return self._cancel([each for each in self._tasks if self._group_of[each] is group], None)

    async def stop(self, reason: CancelReason) -> None:
        """End everything that is played, for the ledger to be told, and wait until it has ended."""
        tasks = list(self._tasks.values())
        self._cancel(list(self._tasks), reason)
        await asyncio.gather(*tasks, return_exceptions=True)

    def _cancel(self, attempts: list[AttemptId], reason: CancelReason | None) -> int:
        """A task is cancelled once: a second time would disturb it in giving back what it holds (case X4)."""
        fresh = [each for each in attempts if not self._tasks[each].cancelling()]
        if reason is not None:
            self._reasons.update(dict.fromkeys(fresh, reason))
        else:
            for attempt_id in attempts:
                self._reasons.pop(attempt_id, None)
        for attempt_id in fresh:
            self._tasks[attempt_id].cancel()
        return len(fresh)

    def _ended(self, attempt_id: AttemptId, task: asyncio.Task[PlayedEpisode]) -> None:
        del self._tasks[attempt_id]
        reason = self._reasons.pop(attempt_id, None)
        if not task.cancelled():
            if error := task.exception():
                self.broken = error
            else:
                self._on_end(task.result())
        elif reason is not None:
            self._on_end(Cancelled(attempt_id, reason))
        else:
            self.over(attempt_id)
