"""Taking in the manifest chain after a loss (P8): what it says is true, and the equation of P3 holds afterwards.

The books may be older than the chain, or empty. A slot that the chain names as consumed is consumed: never delivered
again unless the version that consumed it is off the lineage. What the chain does not know stays as the books have it.
"""

from headrace.platform.errors import LedgerError
from headrace.platform.ledger import policy
from headrace.platform.ledger.books import LOST, Books
from headrace.platform.ledger.checks import IN_FLIGHT, TRAINED, dropped
from headrace.platform.ledger.groups import SWEPT, Group, GroupState, Slot, SlotState
from headrace.platform.ledger.policy import VersionNode
from headrace.platform.records.delivery import Chain, ChainGroup, ChainMember
from headrace.platform.records.status import DropReason, Fate


def reconcile(books: Books, chain: Chain) -> None:
    """See `Ledger.reconcile`."""
    if chain.epoch <= books.epoch:
        raise LedgerError(f"epoch {chain.epoch} is not above {books.epoch}, in which the ledger was reconciled already")
    empty, before, lost_base = not books.lineage, books.sequence, policy.EPOCH_ATTEMPTS * books.epoch
    _begin_epoch(books, chain)
    for version in chain.versions:
        if version.number not in books.lineage:
            books.lineage[version.number] = VersionNode(version.parent, version.batches)
            books.commits[version.number] = (version.content_hash, version.fence)
    if empty:
        books.fates.update(chain.fates)
        books.dispatched = sum(chain.fates.values())
        books.sequence = chain.sequence
    groups = sorted(chain.consumed, key=lambda group: (group.consumed_by, group.group))
    for told in groups:
        group = books.groups.get(told.group)
        if group is not None:
            _consume_known(books, group, told, chain.head)
        elif told.group >= before:
            _create(books, told, counted=empty)
    if groups and not empty:
        _count_lost(books, before, groups[0].size, lost_base)
    books.finish_settled(chain.settled)
    books.recall_orphans(chain.head)
    books.requeue_leased()
    if books.stop_reason:
        books.drop_all()
    books.head = chain.head
    fresh_terms(books)


def fresh_terms(books: Books) -> None:
    """The ledger is trusted again, and nobody loses anything for the time that it was away (P12)."""
    books.suspect = False
    books.learner_seen_s = books.now_s
    for number in books.held.where(bool):
        books.dispatch_leases.set(number, books.now_s + books.limits.dispatch_lease_s)
    for number in books.leased:
        books.learner_leases.set(number, books.now_s + books.limits.learner_lease_s)


def _begin_epoch(books: Books, chain: Chain) -> None:
    books.epoch = chain.epoch
    books.revision = chain.epoch * policy.EPOCH_REVISIONS
    books.fence = max(books.fence, chain.epoch * policy.EPOCH_FENCES)
    books.learner = ""
    books.next_number = max(books.next_number, chain.next_number)


def _consume_known(books: Books, group: Group, told: ChainGroup, head: int) -> None:
    """The group is in the books. What its slots were doing ends; what the chain names is consumed."""
    if group.state is GroupState.CONSUMED:
        if group.consumed_by == told.consumed_by or books.is_on_lineage(group.consumed_by, head):
            return
        books.recall(group)
    members = {member.sample: member for member in told.members}
    for slot in group.slots:
        member = members.get(slot.sample)
        if member is not None:
            _catch_up(books, group.number, slot, member.attempt)
            _consume(books, group.number, slot, member, told.consumed_by)
        else:
            _abandon(books, group.number, slot)
    books.consume(group, told.consumed_by)


def _abandon(books: Books, number: int, slot: Slot) -> None:
    """The slot's present attempt is not in the chain, so it will never be trained."""
    if slot.state is SlotState.RUNNING:
        books.move(number, [slot], LOST)
        slot.end(SWEPT)
    elif slot.state is SlotState.DONE:
        books.move(number, [slot], dropped(DropReason.STOPPED))
        books.forget_payload(slot)
        slot.end(slot.payload_hash)


def _catch_up(books: Books, number: int, slot: Slot, attempt: int) -> None:
    """Bring the slot to `attempt`; whatever was tried in between was lost with the ledger's last writes."""
    if slot.attempt == attempt:
        if slot.state is SlotState.ENDED:
            # A new learner dropped it, and did not live to say so in a manifest of its own.
            slot.state = SlotState.DONE if slot.fate.startswith(Fate.DROPPED) else SlotState.RUNNING
            books.move(number, [slot], IN_FLIGHT)
        return
    _abandon(books, number, slot)
    first = max(slot.attempt + 1, policy.base_of(attempt))
    skipped = [Slot(sample=slot.sample, attempt=missed) for missed in range(first, attempt)]
    books.dispatch(len(skipped) + 1)
    books.move(number, skipped, LOST)
    slot.start(attempt, None, retried=False)


def _create(books: Books, told: ChainGroup, *, counted: bool) -> None:
    """The group is not in the books: enter it as consumed. `counted`: its fates are in the counts already."""
    slots = [Slot(sample=sample, state=SlotState.ENDED, payload_hash=SWEPT) for sample in range(told.size)]
    for member in told.members:
        slot = slots[member.sample]
        slot.attempt, slot.state = member.attempt, SlotState.RUNNING
        if counted:
            _fill(books, slot, member)
            slot.fate = member.fate
            books.tally(slot, 1)
        else:
            books.dispatch(1)
            _consume(books, told.group, slot, member, told.consumed_by)
    base = policy.base_of(min((member.attempt for member in told.members), default=0))
    group = Group(
        number=told.group,
        position=told.position,
        version=told.version,
        dispatched_s=books.now_s,
        deadline_s=books.now_s,
        slots=slots,
        base=base,
        state=GroupState.CONSUMED,
        consumed_by=told.consumed_by,
    )
    books.enter(group)
    books.sequence = max(books.sequence, told.group + 1)


def _consume(books: Books, number: int, slot: Slot, member: ChainMember, version: int) -> None:
    """An attempt in flight gets the fate that the chain states."""
    _fill(books, slot, member)
    books.move(number, [slot], member.fate, version if member.fate == TRAINED else None)


def _fill(books: Books, slot: Slot, member: ChainMember) -> None:
    if slot.state is SlotState.RUNNING:
        # Its put was lost, and when it comes again it is a duplicate.
        books.score_sum += member.score
        books.score_count += 1
        slot.seconds = slot.played_s(books.now_s)
    books.forget_payload(slot)  # P9: the episode store has it
    slot.state, slot.lag = SlotState.DONE, member.lag
    slot.payload_hash, slot.store_file, slot.score = member.payload_hash, member.store_file, member.score
    slot.oldest_version, slot.newest_version = member.oldest_version, member.newest_version


def _count_lost(books: Books, before: int, size: int, base: int) -> None:
    """Groups that were dispatched after the last write that survived, and that no version consumed."""
    for number in range(before, books.sequence):
        if number not in books.groups:
            slots = [Slot(sample=sample, attempt=base) for sample in range(size)]
            books.dispatch(size)
            books.move(number, slots, LOST)
