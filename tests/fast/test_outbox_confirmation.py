"""When a put leaves the outbox, and when it is made again (P8, P11)."""

import logging

import pytest

from headrace.actors.confirmation import Confirmation
from headrace.actors.outbox import Outbox
from headrace.platform.errors import LedgerAway
from headrace.platform.ledger.memory import MemoryLedger
from headrace.platform.ledger.patient import PatientLedger
from headrace.platform.records import AttemptId
from headrace.platform.records.delivery import Chain, ChainVersion, CommitRequest, LedgerLimits, Outcome, Submission
from headrace.platform.records.status import CancelReason, FaultOwner

RUN = "kit-run"
HOLDER = "rollout-0/1"
MARGIN_S = 5.0


class Server(MemoryLedger):
    """A ledger that says of its disk what it is told to, and takes its time."""

    def __init__(self, now):
        limits = LedgerLimits(batch_groups=8, max_lag=4, drop_zero_variance=False, max_attempts=3)
        super().__init__(RUN, limits, lambda: now[0])
        self.now = now
        self.promises = True
        self.takes_s = 0.0
        self.asked = 0
        self.puts = []
        self.while_asked = None

    async def durable(self, timeout_s):
        self.asked += 1
        self.now[0] += self.takes_s
        if self.while_asked is not None:
            await self.while_asked()
        if isinstance(self.promises, Exception):
            raise self.promises
        return self.promises

    async def put(self, submissions):
        replies = await super().put(submissions)
        self.puts.append([reply.verdict.value for reply in replies])
        return replies


class Kit:
    """An outbox of puts to a server that loses things."""

    def __init__(self, tmp_path, groups=3):
        self.now = [100.0]
        self.said = []
        self.server = Server(self.now)
        self.groups = groups
        self.folder = tmp_path / "outbox"
        self.outbox = Outbox(self.folder, RUN)
        self.ledger = PatientLedger(self.server, 60.0, self.said.append, clock=lambda: self.now[0], sleep=self.sleep)
        self.confirmation = self.confirming(self.outbox)
        self.meanwhile = None

    def confirming(self, outbox):
        return Confirmation(self.ledger, outbox, lambda: self.now[0])

    async def sleep(self, seconds):
        self.now[0] += seconds
        if self.meanwhile is not None:
            meanwhile, self.meanwhile = self.meanwhile, None
            await meanwhile()

    async def begin(self):
        fence = await self.server.acquire_learner("test")
        number = await self.server.stage(fence)
        await self.server.commit(
            CommitRequest(fence=fence, number=number, parent=-1, content_hash="h", batches=0, fates={})
        )
        assert len((await self.server.admit(number, 2, self.groups, HOLDER)).tickets) == self.groups
        await self.confirmation.put_left()
        return self

    async def put(self, *submissions):
        """As a delivery does."""
        entries = self.outbox.add(submissions)
        await self.ledger.put(submissions)
        for entry in entries:
            entry.answered_s = self.now[0]

    def kept(self):
        return len(Outbox(self.folder, RUN))

    async def rebuild(self):
        """What the driver does when the server has lost writes: in a new epoch, from the manifests."""
        root = ChainVersion(number=0, parent=-1, batches=0, fence=1, content_hash="h")
        await self.server.reconcile(
            Chain(
                epoch=(await self.server.stats()).epoch + 1,
                head=0,
                settled=-1,
                next_number=1,
                versions=(root,),
                consumed=(),
                sequence=0,
                fates={},
            )
        )


@pytest.fixture
async def kit(tmp_path):
    return await Kit(tmp_path).begin()


def done(group=0, sample=0, attempt=0):
    return Submission(
        attempt_id=AttemptId(RUN, group, sample, attempt),
        outcome=Outcome.DONE,
        payload=b"payload",
        payload_hash=f"{group}.{sample}.{attempt}",
        score=1.0,
    )


def failed(group=0, sample=0, attempt=0):
    attempt_id = AttemptId(RUN, group, sample, attempt)
    return Submission(attempt_id=attempt_id, outcome=Outcome.FAILED, owner=FaultOwner.ENVIRONMENT, retryable=True)


async def test_a_put_leaves_when_it_was_confirmed_some_time_after_its_answer(kit):
    await kit.put(done())
    await kit.confirmation.round()
    assert (kit.kept(), kit.confirmation.durability) == (1, "confirmed"), "a disk may promise more than it keeps"
    kit.now[0] += MARGIN_S - 0.1
    await kit.confirmation.round()
    assert kit.kept() == 1
    kit.now[0] += 0.1
    await kit.confirmation.round()
    assert kit.kept() == 0
    assert kit.server.puts == [["accepted"]]


async def test_an_empty_outbox_asks_nothing(kit):
    await kit.confirmation.round()
    assert kit.server.asked == 0


async def test_a_put_stays_while_the_server_does_not_confirm(kit):
    await kit.put(done())
    kit.server.promises, kit.server.takes_s = False, 5.0
    for _ in range(10):
        kit.now[0] += 100.0
        await kit.confirmation.round()
    assert (kit.kept(), kit.confirmation.durability) == (1, ""), "slow is not unable"


async def test_where_nothing_can_be_confirmed_it_is_best_effort_and_said_once(kit, caplog):
    kit.server.promises = False
    with caplog.at_level(logging.WARNING):
        for number in range(6):
            await kit.put(done(number % 3, number // 3))
            kit.now[0] += 1.0
            await kit.confirmation.round()
    assert kit.confirmation.durability == "best-effort"
    assert caplog.text.count("durability: best-effort") == 1
    assert kit.kept() == 6
    kit.now[0] += MARGIN_S
    await kit.confirmation.round()
    assert kit.kept() == 0, "by age alone"


async def test_one_lost_connection_is_no_lack_of_ability(kit):
    await kit.put(done())
    for error in (LedgerAway("reset"), LedgerAway("refused")):
        kit.server.promises = error
        await kit.confirmation.round()
        await kit.confirmation.round()  # puts again
    kit.server.promises = True
    await kit.confirmation.round()
    assert (kit.confirmation.durability, kit.kept()) == ("confirmed", 1)


async def test_what_the_server_lost_is_put_again_and_not_forgotten(kit):
    """P8, P11: the put was answered, the server went away without its last writes, and came back."""
    mark = await kit.server.mark()
    await kit.put(done(0, 0), failed(0, 1))
    assert (await kit.server.stats()).score_count == 1
    kit.now[0] += 1.0
    await kit.server.rewind(mark)
    kit.meanwhile = kit.rebuild
    await kit.ledger.renew(HOLDER, [0, 1, 2])  # whoever calls first learns of it, and waits
    kit.now[0] += 2 * MARGIN_S
    await kit.confirmation.round()
    assert kit.kept() == 1 + 1
    stats = await kit.server.stats()
    assert (stats.score_count, stats.fates["failed:environment"], stats.holds) == (1, 1, True)
    await kit.confirmation.round()
    assert kit.kept() == 2, "the answer is a new one, and young"
    kit.now[0] += MARGIN_S
    await kit.confirmation.round()
    assert kit.kept() == 0


async def test_a_server_that_dies_while_it_confirms_has_promised_nothing(kit):
    mark = await kit.server.mark()
    await kit.put(done())
    kit.now[0] += 60.0

    async def die():
        await kit.server.rewind(mark)
        await kit.rebuild()

    kit.server.while_asked = die
    await kit.confirmation.round()
    kit.server.while_asked = None
    assert kit.kept() == 1
    assert (await kit.server.stats()).score_count == 0
    await kit.confirmation.round()
    assert (await kit.server.stats()).score_count == 1


async def test_a_server_that_was_away_and_lost_nothing_knows_it_all(kit):
    await kit.put(done(0, 0), failed(0, 1))
    await kit.server.restart()

    async def driver():
        assert await kit.server.confirm(0, "h")

    kit.meanwhile = driver
    await kit.confirmation.round()
    assert kit.server.puts[1:] == [["duplicate", "retry"]], "the attempt after the failed one is being played already"
    stats = await kit.server.stats()
    assert (stats.score_count, stats.dispatched, stats.holds) == (1, 7, True)
    assert stats.refused == {"duplicate": 1}


async def test_what_is_being_put_is_left_to_whoever_puts_it(kit):
    kit.outbox.add([done(0, 1)])
    await kit.put(done(0, 0))
    await kit.rebuild()
    await kit.confirmation.round()
    assert [len(put) for put in kit.server.puts] == [1, 1]


async def test_what_an_earlier_process_left_is_put_once_and_any_answer_ends_it(kit):
    """P11, P2, case Q10: accepted, duplicate, superseded, late, closed or to be played again."""
    await kit.put(done(0, 0), done(1, 0))
    kit.outbox.add([done(0, 1), failed(1, 1)])  # died before the put
    await kit.server.disown(HOLDER)
    await kit.server.admit(0, 2, 3, "rollout-0/2")
    kit.outbox.add([done(2, 0), done(2, 1, 1), done(9, 0)])
    outbox = Outbox(kit.folder, RUN)
    kit.server.puts.clear()
    confirmation = kit.confirming(outbox)
    await confirmation.put_left()
    await confirmation.put_left()
    verdicts = ["duplicate", "duplicate", "superseded", "superseded", "superseded", "accepted", "conflict"]
    assert kit.server.puts == [verdicts]
    kit.now[0] += MARGIN_S
    await confirmation.round()
    assert kit.kept() == 0
    stats = await kit.server.stats()
    assert stats.holds


async def test_an_attempt_that_is_to_be_played_again_is_left_to_its_lease(kit):
    kit.outbox.add([failed(0, 0)])
    outbox = Outbox(kit.folder, RUN)
    await kit.confirming(outbox).put_left()
    assert kit.server.puts == [["retry"]]
    kit.now[0] += 16.0
    stats = await kit.server.stats()
    assert (stats.groups_waiting, stats.fates["failed:infrastructure"]) == (3, 6)
    (ticket,) = (await kit.server.admit(0, 2, 1, "rollout-0/2")).tickets
    assert ticket.attempts == ((0, 2), (1, 1))


async def test_many_are_put_in_batches(tmp_path):
    kit = await Kit(tmp_path, groups=30).begin()
    reason = CancelReason.STOPPED
    kit.outbox.add(
        [
            Submission(attempt_id=AttemptId(RUN, n % 30, 0, n), outcome=Outcome.CANCELLED, reason=reason)
            for n in range(1000)
        ]
    )
    await kit.confirming(Outbox(kit.folder, RUN)).put_left()
    assert [len(put) for put in kit.server.puts] == [512, 488]
