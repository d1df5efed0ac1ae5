"""After a restart of the ledger's server: trust it, or rebuild it from the run root (P8, case Q21).

One part of a run does this, the driver; the others wait in `PatientLedger` meanwhile. What the run root says is
`chain.py`'s part, what the ledger makes of it the ledger's. Nothing here is remembered: after an error, or a crash at
any line, it is done again, in a newer epoch.
"""

import asyncio
from collections.abc import Callable, Collection, Iterable

from headrace.platform.contracts import Ledger, VersionRegistry
from headrace.platform.ledger.chain import believed, chain_of, newest
from headrace.platform.ledger.policy import NO_VERSION
from headrace.platform.records.delivery import LedgerLimits
from headrace.platform.records.tables import FateRow


async def reconcile(
    ledger: Ledger,
    registry: VersionRegistry,
    *,
    limits: LedgerLimits,
    checkpoints: Callable[[], Collection[int]],
    fate_rows: Callable[[], Iterable[FateRow]],
    group_size: int,
    sequence: int = 0,
) -> bool:
    """Make the ledger trusted again; whether its books were changed, and so every fence is void.

    Args:
        ledger: the run's, straight, not through `PatientLedger`.
        registry: holds the manifests, and gives out epochs.
        limits: the run's.
        checkpoints: reads which versions have a complete checkpoint; called off the event loop.
        fate_rows: reads the run root's fate table, in order; likewise.
        group_size: how many slots a group has.
        sequence: the dispatch sequence of the newest complete checkpoint.

    Raises:
        LedgerAway: the server is away again.
        LedgerError: somebody else has reconciled it in a later epoch meanwhile.
    """
    chain = believed(await registry.manifests(), limits)
    head = newest(chain)
    if await ledger.confirm(head, "" if head == NO_VERSION else chain[head].content_hash):
        return False
    epoch = await registry.claim_epoch()
    told = chain_of(
        chain,
        epoch=epoch,
        highest=await registry.highest_number(),
        checkpoints=await asyncio.to_thread(checkpoints),
        known_head=(await ledger.stats()).head,
        rows=await asyncio.to_thread(fate_rows),
        group_size=group_size,
        sequence=sequence,
    )
    await ledger.reconcile(told)
    return True
