"""Which session holds which slot, and what the slot has cached.

Owns the slots' owners and their token ids; the keys and values themselves are tensors elsewhere. Invariants: a slot
belongs to one (session, version), so nothing is ever reused across versions (case S3); `ids[slot, :cached[slot]]` are
exactly the tokens whose keys and values are stored. Slot 0 is scratch and has no owner.
"""

from collections import OrderedDict

import numpy as np

from headrace.platform.records.arrays import I32


class SlotTable:
    """A fixed number of slots, lent to one running request at a time, kept afterwards until someone needs them.

    Args:
        slots: how many sessions can be held.
        positions: the longest context of a session, in tokens.
    """

    def __init__(self, slots: int, positions: int) -> None:
        self.positions = positions
        self.ids = np.zeros((slots + 1, positions), np.int32)
        self.logprobs = np.zeros((slots + 1, positions), np.float32)
        self.cached = np.zeros(slots + 1, np.int64)
        self._free = list(range(slots, 0, -1))
        self._idle: OrderedDict[int, tuple[str, int]] = OrderedDict()
        self._slot_of: dict[str, dict[int, int]] = {}
        self._drop_when_parked: set[int] = set()

    def is_lent(self, session: str, version: int) -> bool:
        """A running request has the slot of this session and version."""
        slot = self._slot_of.get(session, {}).get(version)
        return slot is not None and slot not in self._idle

    def lend(self, session: str, version: int) -> int | None:
        """The slot of this session and version: its own, a free one, or the one longest idle; None when all run."""
        slot = self._slot_of.get(session, {}).get(version)
        if slot is not None:
            del self._idle[slot]
            return slot
        if not self._free and self._idle:
            oldest, owner = self._idle.popitem(last=False)
            self._forget(oldest, *owner)
        if not self._free:
            return None
        slot = self._free.pop()
        self._slot_of.setdefault(session, {})[version] = slot
        return slot

    def move(self, slot: int, session: str, version: int, to: int) -> None:
        """A lent slot changes to a version of which the session has none. Its tokens stay; their keys and values are
        the old version's, so that all of them are to be computed anew (case S3)."""
        held = self._slot_of[session]
        del held[version]
        held[to] = slot
        self.cached[slot] = 0

    def forget_others(self, session: str, version: int) -> None:
        """Free the idle slots that a session has of other versions: it does not go back to them."""
        for other, slot in list(self._slot_of.get(session, {}).items()):
            if other != version and slot in self._idle:
                del self._idle[slot]
                self._forget(slot, session, other)

    def fill(self, slot: int, token_ids: I32) -> int:
        """Write a request's context and return how many of its tokens are cached already. At least the last token is
        left to be computed, for its logits are wanted."""
        compared = min(int(self.cached[slot]), len(token_ids) - 1)
        same = self.ids[slot, :compared] == token_ids[:compared]
        reused = compared if same.all() else int(same.argmin())
        self.ids[slot, reused : len(token_ids)] = token_ids[reused:]
        self.cached[slot] = reused
        return reused

    def park(self, slot: int, session: str, version: int, keep: bool = True) -> None:
        """A request is done with its slot. `keep` is false when what it holds must not be used again."""
        if keep and slot not in self._drop_when_parked:
            self._idle[slot] = (session, version)
            return
        self._drop_when_parked.discard(slot)
        self._forget(slot, session, version)

    def release(self, session: str) -> None:
        """Free the slots of a session; one that is lent follows when it is parked."""
        for version, slot in list(self._slot_of.get(session, {}).items()):
            if slot in self._idle:
                del self._idle[slot]
                self._forget(slot, session, version)
            else:
                self._drop_when_parked.add(slot)

    def retire(self, version: int) -> None:
        """Free the idle slots of a version."""
        for slot, (session, held) in list(self._idle.items()):
            if held == version:
                del self._idle[slot]
                self._forget(slot, session, version)

    def _forget(self, slot: int, session: str, version: int) -> None:
        held = self._slot_of[session]
        del held[version]
        if not held:
            del self._slot_of[session]
        self.cached[slot] = 0
        self._free.append(slot)
