"""The folders that a box's writable folders are made of, and who still needs them.

`/workspace` and `/tmp` of a box each have an upper folder, which takes what is written, over layers that nobody writes
any more. A snapshot is a copy of the two upper folders as layers of their own; a box that is restored from it stacks
them. A layer is removed when neither a snapshot nor a box needs it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from headrace.actors.sandboxes.shell import ShellState
from headrace.actors.sandboxes.trees import copy_layer, remove_tree

PLACES = ("workspace", "tmp")
MOST_LAYERS = 12
"""A mount's options have to fit into a page; longer stacks are merged when a snapshot is taken."""


@dataclass(kw_only=True, slots=True)
class Layer:
    """One folder `path` with `workspace` and `tmp` in it, and how many need it."""

    path: Path
    users: int = 0


@dataclass(kw_only=True, slots=True)
class Snapshot:
    """Layers from the lowest up, and the shell's state. Holds its layers until `release`."""

    layers: Sequence[Layer]
    state: ShellState
    released: bool = field(default=False)

    def __post_init__(self) -> None:
        hold(self.layers)


def hold(layers: Sequence[Layer]) -> None:
    """Need them from now on."""
    for layer in layers:
        layer.users += 1


def let_go(layers: Sequence[Layer]) -> list[Path]:
    """Need them no more; the folders of those that nobody needs, to be removed."""
    for layer in layers:
        layer.users -= 1
    return [layer.path for layer in layers if not layer.users]


def copy_upper(below: Sequence[Layer], upper: Path, target: Path, limit: int) -> None:
    """Make `target` a layer of what lies in `upper`, and of all `below` it where the stack is long. Blocks.

    Raises:
        OSError: `upper` takes more than `limit` bytes, there is no room, or folders are too deep; `target` is gone
            then.
    """
    try:
        target.mkdir()
        sources = [*(layer.path for layer in below), upper] if len(below) >= MOST_LAYERS else [upper]
        left = limit
        for name in PLACES:
            for source in sources:
                # Those below are as they were when they were found small enough.
                used = copy_layer(source / name, target / name, left if source == upper else None)
            left -= used
    except BaseException:
        remove_tree(target)
        raise


def stacked(below: Sequence[Layer], target: Path) -> list[Layer]:
    """The layers of a box over `below` whose upper folders `copy_upper` has copied to `target`."""
    return [*(below if len(below) < MOST_LAYERS else ()), Layer(path=target)]
