"""When a run that fails more than it plays must stop: a pure decision."""

from collections.abc import Sequence

from headrace.platform.records.delivery import LedgerStats

FEWEST_ENDED = 32
"""Attempts that must have ended before a rate means anything."""


def failure_cause(stats: LedgerStats, max_failure_rate: float, faults: Sequence[str]) -> str | None:
    """Why the run should stop, None while it may go on (case E8).

    Args:
        stats: the ledger's counts.
        max_failure_rate: the largest share of ended attempts that may have failed.
        faults: the last faults of episodes; one is quoted.
    """
    failed = sum(count for fate, count in stats.fates.items() if fate.startswith("failed"))
    ended = stats.dispatched - stats.fates.get("in_flight", 0)
    if ended < FEWEST_ENDED or failed <= max_failure_rate * ended:
        return None
    owners = {fate.removeprefix("failed:"): n for fate, n in stats.fates.items() if fate.startswith("failed")}
    example = f"; the last one: {faults[-1]}" if faults else ""
    return f"{failed} of {ended} attempts failed (by owner: {owners}), more than {max_failure_rate:.0%}{example}"
