"""What a re-execution found: each hash that did not come out as recorded, and what may be said of the whole."""

import difflib

import msgspec

from headrace.platform.hashing import hash_text
from headrace.platform.records.message import HashPair

_MOST_LINES = 12
_WIDTH = 160


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """Something that did not come out as recorded. `step` 0 is the reset, step n the n-th turn of the policy.

    `what` is "tools" (what the world offers), "observation", "state", "status", "end", "reward", "external" (what was
    asked of services outside), "fault", or "grader" (its version, or what it gives the recorded episode now). `diff`
    shows the texts, where they are known, as some lines of a unified diff; tools and a state are known by their hashes
    alone.
    """

    step: int
    what: str
    recorded: HashPair
    replayed: HashPair
    diff: tuple[str, ...] = ()

    @property
    def is_divergence(self) -> bool:
        """More than something accidental differs."""
        return self.recorded.canonical != self.replayed.canonical


class ReplayReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a replay found. `first_divergence` is a step number, None when the episode replays equal.

    `from_record` is empty, or how the episode ended where no world can be asked about it: by a fault, a kill, a
    time-out. Then all before is what was compared. `fidelity_gap` counts the answers of services outside the world
    that came from the cassette, at `fidelity_steps`; `live_calls` those that were asked for anew.

    `interrupted` is empty, or what kept the replay from its end that says nothing about the world: a host or a sandbox
    that is gone, say. Then nothing is claimed. `nowhere`: no host took the session at all.
    """

    episode_id: str
    steps: int
    first_divergence: int | None
    differences: tuple[Difference, ...]
    from_record: str = ""
    fidelity_gap: int = 0
    fidelity_steps: tuple[int, ...] = ()
    live_calls: int = 0
    interrupted: str = ""
    nowhere: bool = False

    @property
    def equal(self) -> bool:
        """It was played to its end, and every canonical hash is as recorded."""
        return self.first_divergence is None and not self.interrupted


def difference_of_texts(step: int, what: str, recorded: str, replayed: str) -> Difference:
    """Two texts that differ."""
    return Difference(
        step=step,
        what=what,
        recorded=hash_text(recorded),
        replayed=hash_text(replayed),
        diff=small_diff(recorded, replayed),
    )


def small_diff(recorded: str, replayed: str) -> tuple[str, ...]:
    """Some lines of a unified diff, each of bounded width."""
    lines = [
        line if len(line) <= _WIDTH else f"{line[: _WIDTH - 3]}..."
        for line in difflib.unified_diff(recorded.splitlines(), replayed.splitlines(), lineterm="", n=1)
        if not line.startswith(("--- ", "+++ "))
    ]
    left = len(lines) - _MOST_LINES
    return tuple(lines) if left <= 0 else (*lines[:_MOST_LINES], f"({left} more lines)")
