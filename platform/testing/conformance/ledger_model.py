"""Random play on a ledger, with the invariants that hold after every step.

The same steps on two ledgers make the same calls as long as the replies are the same: compare the traces of `play` to
hold an implementation to `MemoryLedger`. `ledger_machine.py` is the same model as a Hypothesis state machine.
"""

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple

from headrace.platform.errors import LedgerError
from headrace.platform.records.delivery import LedgerLimits, LedgerStats
from headrace.platform.records.tables import FateRow
from headrace.platform.testing.conformance.ledger_harness import LedgerHarness, limits
from headrace.platform.testing.conformance.ledger_player import Player

MODEL_LIMITS: LedgerLimits = limits(
    max_lag=2,
    max_attempts=2,
    max_deliveries=2,
    dispatch_lease_s=30.0,
    max_age_s=100.0,
    early_missing=1,
    lag_restarts=1,
)
"""Small enough for every limit to be met within a few steps."""
MASK_LIMITS: LedgerLimits = limits(max_lag=1, max_attempts=3, mask_over_lag=True, lag_restarts=2)
"""The same for groups that stay while a token is in time."""

Outcome = tuple[object, Sequence[FateRow], LedgerStats]
"""A step's reply, or the name of the error; the fates that it changed; the counts after it."""


class Step(NamedTuple):
    """One move; `kind` is one of `STEP_KINDS`."""

    kind: str
    a: int = 0
    b: int = 0
    c: int = 0


_MOVES: dict[str, Callable[[Player, int, int, int], Coroutine[Any, Any, object]]] = {
    move.__name__: move
    for move in (
        Player.admit,
        Player.finish,
        Player.end_one,
        Player.renew,
        Player.disown,
        Player.allow,
        Player.acquire,
        Player.lease,
        Player.at_risk,
        Player.extend,
        Player.release,
        Player.drop,
        Player.stage,
        Player.commit,
        Player.commit_again,
        Player.settle,
        Player.rollback,
        Player.advance,
        Player.stop,
        Player.mark,
        Player.rewind,
        Player.wipe,
        Player.restart,
        Player.recover,
    )
}
_OFTEN = {"admit": 9, "finish": 14, "end_one": 4, "lease": 10, "commit": 8, "at_risk": 2, "acquire": 2, "mark": 2}


def _weighted(*kinds: str) -> tuple[str, ...]:
    return tuple(kind for kind in kinds for _ in range(_OFTEN.get(kind, 1)))


WORKER_KINDS = _weighted("admit", "finish", "end_one", "renew", "disown", "allow", "advance")
LEARNER_KINDS = _weighted(
    "acquire", "lease", "at_risk", "extend", "release", "drop", "stage", "commit", "commit_again", "settle", "rollback"
)
LOSS_KINDS = _weighted("mark", "rewind", "wipe", "restart", "recover", "stop")
STEP_KINDS: tuple[str, ...] = WORKER_KINDS + LEARNER_KINDS + LOSS_KINDS
"""Every kind of step; what a run mostly consists of occurs more often."""


async def take(player: Player, step: Step) -> Outcome:
    """Make one move. Raises AssertionError when an invariant broke."""
    try:
        reply = await _MOVES[step.kind](player, step.a, step.b, step.c)
    except LedgerError as error:
        reply = type(error).__name__
    return (reply, *await player.checked())


async def begin(player: Player) -> None:
    """From an empty ledger to version 0."""
    await player.acquire(0, 0, 0)
    await player.commit(0, 0, 0)


async def end(player: Player) -> Outcome:
    """Close the books; nothing may be left in flight."""
    if (await player.ledger.stats()).suspect:
        await player.recover(0, 0, 0)
    await player.ledger.stop("end")
    rows, stats = await player.checked()
    left = (stats.fates["in_flight"], stats.groups_open, stats.groups_ready, stats.groups_leased, stats.payload_bytes)
    assert left == (0, 0, 0, 0, 0), f"after the end there is still something in flight: {stats}"
    return None, rows, stats


async def play(harness: LedgerHarness, steps: Sequence[Step], chosen: LedgerLimits = MODEL_LIMITS) -> list[Outcome]:
    """Play `steps` from version 0 on, then close the books. `chosen` are the limits of the harness's ledger.

    Raises:
        AssertionError: an invariant broke.
    """
    player = Player(harness, chosen)
    await begin(player)
    return [*[await take(player, step) for step in steps], await end(player)]
