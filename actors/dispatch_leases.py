"""Keeps the dispatch leases of a worker's groups (P2), and obeys what the ledger says about them.

A lease is renewed for as long as its group has a slot left. The ledger counts a lease from when it hears of it; this
side counts it from before it asked, on its own monotonic clock (P12). So it gives a group up before the ledger gives
it away, and no slot is sampled twice: whoever's lease lapsed plays no further, also when no word comes from the
server at all.
"""

import logging
import time

from headrace.actors.attempts import Attempts
from headrace.platform.contracts import Clock, Ledger
from headrace.platform.records.status import CancelReason

_log = logging.getLogger(__name__)
_STILL_OURS = (CancelReason.LAG, CancelReason.ROLLED_BACK)


class DispatchLeases:
    """The leases of one worker.

    Args:
        ledger: who grants them.
        holder: under which name.
        attempts: the groups.
        lease_s: how long one lasts.
    """

    def __init__(
        self, ledger: Ledger, holder: str, attempts: Attempts, lease_s: float, clock: Clock = time.monotonic
    ) -> None:
        self._ledger = ledger
        self._holder = holder
        self._attempts = attempts
        self._lease_s = lease_s
        self._clock = clock

    async def renew(self) -> None:
        """Renew the leases of all open groups, and end those that the ledger says are not worth going on with."""
        groups = self._attempts.groups
        if not groups:
            return
        asked_s = self._clock()
        notices = await self._ledger.renew(self._holder, list(groups))
        reasons = {notice.group: notice.reason for notice in notices}
        for number, group in groups.items():
            reason = reasons.get(number)
            if reason is None or reason in _STILL_OURS:
                group.leased_s = max(group.leased_s, asked_s)
            if reason is None:
                continue
            ended = (
                self._attempts.cancel(group, reason) if reason in _STILL_OURS else self._attempts.abandon(group)
            )  # what is not ours any more is not ours to end in the books either
            if ended:
                _log.info("group %d is abandoned with %d attempts: %s", number, ended, reason)

    def lapse(self) -> float:
        """Give up the groups whose leases have run out unheard; the seconds until that may be the next one's turn."""
        now_s = self._clock()
        left_s = self._lease_s
        for number, group in self._attempts.groups.items():
            due_s = group.leased_s + self._lease_s
            if due_s > now_s:
                left_s = min(left_s, due_s - now_s)
            else:
                ended = self._attempts.abandon(group)
                _log.warning(
                    "group %d is given up with %d attempts: its lease was not renewed for %.1f s",
                    number,
                    ended,
                    now_s - group.leased_s,
                )
        return left_s
