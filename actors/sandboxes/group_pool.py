"""The control groups of one provider's boxes: made as boxes need them, and used again once a box has ended.

To make and remove a group costs the kernel as much as to start a small program; an empty one is as good as new, apart
from what it still has charged (pages that the kernel keeps of files) and counted. What is not empty, or has much
charged, is removed instead. Every group is listed in the owner's folder before it is made, so that the reaper finds it.
"""

from pathlib import Path

from headrace.actors.sandboxes.cgroups import Group, Parents
from headrace.actors.sandboxes.reaping import LISTED_GROUPS
from headrace.platform.contracts import BoxLimits

_MOST_IDLE = 32


class GroupPool:
    """Groups in `parents` for boxes of `limits`, named after the folder `owned`. `take` from one thread."""

    def __init__(self, parents: Parents, owned: Path, limits: BoxLimits) -> None:
        self._parents, self._owned, self._limits = parents, owned, limits
        self._idle: list[Group] = []
        self._made = 0

    def take(self) -> Group:
        """An empty group. Raises OSError when none can be made."""
        if self._idle:
            return self._idle.pop()
        self._made += 1
        name = f"headrace-{self._owned.name}-{self._made}"
        with (self._owned / LISTED_GROUPS).open("a") as listed:
            listed.writelines(f"{path}\n" for path in self._parents.named(name))
        return Group(self._parents, name, self._limits)

    def give_back(self, group: Group) -> None:
        """Keep it for another box, or remove it with all that is in it. Blocks."""
        if len(self._idle) < _MOST_IDLE and group.is_fresh():
            self._idle.append(group)
        else:
            group.remove()

    def close(self) -> None:
        """Remove those that are kept. Blocks."""
        while self._idle:
            self._idle.pop().remove()
