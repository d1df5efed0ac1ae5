"""The systems of transport_ack.py and the round that measures one: a producer and a consumer, each a forked process.

Both sides begin when both are connected, and each reports the CPU that it used from there on. The consumer learns
what it must from the server alone; only the head goes from consumer to producer through shared memory, as a worker
learns it from its inference pool.
"""

import asyncio
import itertools
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any, Protocol

import msgspec
import redis
from common import cpu_s
from transport_episode import KEPT_IN_CACHE, TOKENS, TURNS, make_episode

from headrace.platform.fidelity import check_episode
from headrace.platform.hashing import digest
from headrace.platform.ledger.redis_ledger import RedisLedger
from headrace.platform.ledger.server import EmbeddedServer
from headrace.platform.records import AttemptId, Episode
from headrace.platform.records.codec import episode_codec
from headrace.platform.records.delivery import CommitRequest, LeasedGroup, LedgerLimits, Outcome, Submission

GROUP, GROUPS = 8, 4
BATCH = GROUP * GROUPS
MOST_QUEUED = 256
PAUSE_S = 0.002
ROUND_DEADLINE_S = 120.0
LIMITS = LedgerLimits(batch_groups=GROUPS, max_lag=MOST_QUEUED // BATCH - 1, group_deadline_s=600.0)
_FORK = multiprocessing.get_context("fork")
_runs = (f"bench-{number}" for number in itertools.count())


class Meeting(msgspec.Struct):
    """What the two sides of a round share: the start, the run, and the published head."""

    start: Any
    run: str
    head: "Synchronized[int]"


class System(Protocol):
    """Something that carries episodes."""

    def prepare(self, url: str, run: str) -> None:
        """Before the clock starts."""

    def produce(self, url: str, meeting: Meeting, count: int) -> float:
        """Wait for the start, send `count` episodes; CPU seconds from the start on."""

    def consume(self, url: str, meeting: Meeting, count: int) -> float:
        """Wait for the start, take `count` episodes; CPU seconds from the start on."""


def server_cpu_s(pid: int) -> float:
    """CPU seconds of all threads of a process, from the scheduler's own clock."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


def run_round(system: System, server: EmbeddedServer, count: int) -> dict[str, float]:
    """Microseconds of CPU per episode: producer, consumer, server, and their sum. A side that fails ends the round."""
    meeting = Meeting(_FORK.Barrier(3), next(_runs), _FORK.Value("l", 0))
    system.prepare(server.url, meeting.run)
    sides = {
        name: _Side(side, server.url, meeting, count)
        for name, side in (("producer", system.produce), ("consumer", system.consume))
    }
    try:
        before = server_cpu_s(server.pid)
        meeting.start.wait(ROUND_DEADLINE_S)
        used = {name: side.cpu_s() for name, side in sides.items()}
        used["server"] = server_cpu_s(server.pid) - before
    finally:
        for side in sides.values():
            side.end()
    with redis.Redis.from_url(server.url) as client:
        client.flushall()
    costs = {name: seconds / count * 1e6 for name, seconds in used.items()}
    return costs | {"sum": sum(costs.values())}


class _Side:
    """A process that plays one side of a round."""

    def __init__(self, side: Callable[[str, Meeting, int], float], url: str, meeting: Meeting, count: int) -> None:
        self._receiver, sender = _FORK.Pipe(duplex=False)
        self._process = _FORK.Process(target=lambda: sender.send(side(url, meeting, count)))
        self._process.start()
        sender.close()

    def cpu_s(self) -> float:
        """What it used; raises EOFError when it has failed, TimeoutError when it takes too long."""
        if not self._receiver.poll(ROUND_DEADLINE_S):
            raise TimeoutError(f"a side of the round is not done after {ROUND_DEADLINE_S:g} s")
        return float(self._receiver.recv())

    def end(self) -> None:
        """Gone, one way or another."""
        self._process.kill()
        self._process.join()


def episodes() -> Iterator[Episode]:
    """Episodes without end; made once, before the clock."""
    return itertools.cycle([make_episode(number) for number in range(KEPT_IN_CACHE)])


class Floor:
    """Raw Redis Streams with a consumer group."""

    def prepare(self, url: str, run: str) -> None:
        """The stream and its group."""
        with redis.Redis.from_url(url) as client:
            client.xgroup_create(run, "learner", id="0", mkstream=True)

    def produce(self, url: str, meeting: Meeting, count: int) -> float:
        """XADD in pipelines of 32."""
        source, client = episodes(), redis.Redis.from_url(url)
        client.ping()
        meeting.start.wait()
        before = cpu_s()
        for sent in range(0, count, BATCH):
            pipeline = client.pipeline(transaction=False)
            for number, episode in zip(range(sent, sent + BATCH), source, strict=False):
                pipeline.xadd(meeting.run, {"d": episode_codec.encode(_named(episode, meeting.run, number, 0))})
            pipeline.execute()
            while sent % (4 * BATCH) == 0 and client.xlen(meeting.run) > MOST_QUEUED - 4 * BATCH:
                time.sleep(PAUSE_S)
        return cpu_s() - before

    def consume(self, url: str, meeting: Meeting, count: int) -> float:
        """XREADGROUP with count 32, XACK and XDEL."""
        client, taken = redis.Redis.from_url(url), 0
        client.ping()
        meeting.start.wait()
        before = cpu_s()
        while taken < count:
            found: Any = client.xreadgroup("learner", "c", {meeting.run: ">"}, count=BATCH, block=5000)
            ids = [_touched(entry, episode_codec.decode(fields[b"d"])) for entry, fields in found[0][1]]
            pipeline = client.pipeline(transaction=False)
            pipeline.xack(meeting.run, "learner", *ids)
            pipeline.xdel(meeting.run, *ids)
            pipeline.execute()
            taken += len(ids)
        return cpu_s() - before


def _named(episode: Episode, run: str, group: int, sample: int) -> Episode:
    return msgspec.structs.replace(episode, attempt_id=AttemptId(run, group, sample))


def _touched(entry: bytes, episode: Episode) -> bytes:
    assert len(episode.turns[-1].token_ids)
    return entry


class Product:
    """headrace's ledger. One that `judges` hashes payloads on both sides and sends them through the fidelity gate."""

    def __init__(self, *, judges: bool) -> None:
        self._judges = judges

    def prepare(self, url: str, run: str) -> None:
        """A run whose version 0 is published."""

        async def begin() -> None:
            ledger = await RedisLedger.connect(url, run, LIMITS)
            await publish(ledger, await ledger.acquire_learner("c"), -1, ())
            await ledger.close()

        asyncio.run(begin())

    def produce(self, url: str, meeting: Meeting, count: int) -> float:
        """Admit four groups and put their 32 episodes in one call, as a worker does with what has piled up."""
        return asyncio.run(self._produce(url, meeting, count))

    async def _produce(self, url: str, meeting: Meeting, count: int) -> float:
        ledger, source = await RedisLedger.connect(url, meeting.run, LIMITS), episodes()
        meeting.start.wait()
        before, left = cpu_s(), count
        while left:
            admission = await ledger.admit(meeting.head.value, GROUP, min(GROUPS, left // GROUP), "p")
            if not admission.tickets:
                await asyncio.sleep(PAUSE_S)
                continue
            submissions = [
                self._submission(_named(next(source), meeting.run, ticket.group, sample), ticket.version)
                for ticket in admission.tickets
                for sample in range(GROUP)
            ]
            replies = await ledger.put(submissions)
            assert not any(reply.verdict.is_refusal for reply in replies)
            left -= len(submissions)
        used = cpu_s() - before
        await ledger.close()
        return used

    def _submission(self, episode: Episode, version: int) -> Submission:
        payload = episode_codec.encode(episode)
        return Submission(
            attempt_id=episode.attempt_id,
            outcome=Outcome.DONE,
            payload=payload,
            payload_hash=digest(payload) if self._judges else str(episode.attempt_id),
            store_file="episodes/bench-000000.parquet",
            score=float(episode.attempt_id.sample % 2),
            oldest_version=version,
            newest_version=version,
            environment="lookup@1",
            action_tokens=TURNS // 2 * TOKENS,
        )

    def consume(self, url: str, meeting: Meeting, count: int) -> float:
        """Lease four groups, open them, publish a version that consumed them, settle it."""
        return asyncio.run(self._consume(url, meeting, count))

    async def _consume(self, url: str, meeting: Meeting, count: int) -> float:
        ledger = await RedisLedger.connect(url, meeting.run, LIMITS)
        fence = await ledger.acquire_learner("c")
        meeting.start.wait()
        before, taken, head, read = cpu_s(), 0, 0, 0
        while taken < count:
            groups = await ledger.lease(fence, head, 0, GROUPS)
            if not groups:
                await asyncio.sleep(PAUSE_S)
                continue
            for group in groups:
                self._open(group)
            meeting.head.value = head = await publish(ledger, fence, head, groups)
            await ledger.settle(fence, head)
            taken += sum(len(group.members) for group in groups)
            if head % 32 == 0:  # as the driver does, at its leisure
                read = (await ledger.fates(read, 10_000))[1]
        used = cpu_s() - before
        await ledger.close()
        return used

    def _open(self, group: LeasedGroup) -> None:
        for member in group.members:
            if self._judges:
                assert digest(member.payload) == member.payload_hash
            episode = episode_codec.decode(member.payload)
            assert episode.attempt_id == member.attempt_id
            if self._judges:
                check_episode(episode, from_wire=True)


async def publish(ledger: RedisLedger, fence: int, parent: int, groups: Sequence[LeasedGroup]) -> int:
    """Stage and commit a version that trained on `groups`; returns its number."""
    number = await ledger.stage(fence)
    request = CommitRequest(
        fence=fence,
        number=number,
        parent=parent,
        content_hash=f"content-{number}",
        batches=1 if groups else 0,
        fates={str(member.attempt_id): "trained" for group in groups for member in group.members},
    )
    await ledger.commit(request)
    return number
