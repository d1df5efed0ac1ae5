"""Whether the ledger's cost per episode stays flat: with many episodes queued, and after many have finished.

One process plays workers, learner and driver with payloads of 64 bytes, so that a hundred thousand of them fit and
the cost is the ledger's own. Each sample puts 64 groups, one by one, then leases as many, commits and settles them
and reads their fates, while the rest of the queue stands. A figure is the CPU time of this process and of the server
per episode. Each depth has a server of its own, and all take turns, so that what else the machine does meets them
alike; what has finished is compared with a fresh run in the same way.
"""

import statistics
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from operator import truediv
from pathlib import Path
from tempfile import TemporaryDirectory

import redis
from common import cpu_s
from transport_systems import GROUP, publish, server_cpu_s

from headrace.platform.ledger.redis_ledger import RedisLedger
from headrace.platform.ledger.server import EmbeddedServer
from headrace.platform.records import AttemptId
from headrace.platform.records.delivery import LedgerLimits, Outcome, Submission

PAYLOAD = b"x" * 64
SAMPLES = 9
AT_ONCE = 64
LIMITS = LedgerLimits(batch_groups=2048, max_lag=2 * SAMPLES, group_deadline_s=3600.0)


@dataclass(kw_only=True, slots=True)
class Flatness:
    """Samples in microseconds of CPU per episode, by how many episodes were queued, or had finished."""

    queued: dict[int, list[float]] = field(default_factory=dict)
    finished: dict[int, list[float]] = field(default_factory=dict)
    bytes_per_finished: float = 0.0
    count: int = 0

    @staticmethod
    def growth(figures: Mapping[int, Sequence[float]]) -> float:
        """The highest of the medians of the ratios to the first."""
        first, *others = figures.values()
        return max(round(statistics.median(map(truediv, samples, first)), 3) for samples in others)


class _Run:
    """One run and everybody in it."""

    def __init__(self, server: EmbeddedServer, name: str) -> None:
        self._server, self._name = server, name
        self._head, self._read = -1, 0
        self._fence = 0
        self._ledger: RedisLedger

    async def __aenter__(self) -> "_Run":
        self._ledger = await RedisLedger.connect(self._server.url, self._name, LIMITS)
        self._fence = await self._ledger.acquire_learner("c")
        self._head = await publish(self._ledger, self._fence, -1, ())
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._ledger.close()

    async def put(self, groups: int, at_once: int = 1) -> None:
        """Play so many groups and put them, `at_once` in a call."""
        admission = await self._ledger.admit(self._head, GROUP, groups, "p")
        assert len(admission.tickets) == groups
        for first in range(0, groups, at_once):
            submissions = [
                self._submission(ticket.group, sample)
                for ticket in admission.tickets[first : first + at_once]
                for sample in range(GROUP)
            ]
            assert not any(reply.verdict.is_refusal for reply in await self._ledger.put(submissions))

    def _submission(self, group: int, sample: int) -> Submission:
        return Submission(
            attempt_id=AttemptId(self._name, group, sample),
            outcome=Outcome.DONE,
            payload=PAYLOAD,
            payload_hash=f"{group:060}{sample:04}",
            store_file="episodes/bench-000000.parquet",
            score=float(sample % 2),
            oldest_version=self._head,
            newest_version=self._head,
            action_tokens=800,
        )

    async def train(self, groups: int) -> None:
        """Lease, publish, settle."""
        leased = await self._ledger.lease(self._fence, self._head, 0, groups)
        assert len(leased) == groups
        self._head = await publish(self._ledger, self._fence, self._head, leased)
        await self._ledger.settle(self._fence, self._head)

    async def drain(self) -> None:
        """Read the fates, as the driver does; what was read is forgotten."""
        while (position := (await self._ledger.fates(self._read, 20_000))[1]) != self._read:
            self._read = position

    async def sample(self) -> float:
        """Microseconds of CPU per episode of one batch."""
        before = cpu_s() + server_cpu_s(self._server.pid)
        await self.put(AT_ONCE)
        await self.train(AT_ONCE)
        await self.drain()
        used = cpu_s() + server_cpu_s(self._server.pid) - before
        return used / (AT_ONCE * GROUP) * 1e6

    async def finish(self, episodes: int) -> None:
        """Play and train at least so many, in large calls."""
        for _ in range(-(-episodes // (AT_ONCE * GROUP))):
            await self.put(AT_ONCE, at_once=AT_ONCE // 4)
            await self.train(AT_ONCE)
            await self.drain()

    async def queue(self, episodes: int) -> None:
        """Let about so many stand in the queue; then wait for the server's background work to end."""
        left = episodes // GROUP
        while left:
            groups = min(left, AT_ONCE)
            await self.put(groups, at_once=AT_ONCE // 4)
            left -= groups
        self.wait_until_calm()

    def wait_until_calm(self) -> None:
        """The server writes its append-only file anew when it has grown: that is not to be measured."""
        with redis.Redis.from_url(self._server.url) as client:
            while client.info("persistence")["aof_rewrite_in_progress"]:
                time.sleep(0.1)

    def memory_bytes(self) -> int:
        """What the server has allocated."""
        with redis.Redis.from_url(self._server.url) as client:
            return int(client.info("memory")["used_memory"])


async def measure_flatness(folder: Path, queued: int, finished: int) -> Flatness:
    """Powers of ten up to `queued` episodes in the queue, and up to `finished` behind it."""
    flat = Flatness()
    async with _runs(folder, _powers(100, queued)) as runs:
        for depth, run in runs.items():
            await run.queue(depth)
        flat.queued = await _in_turns(runs)
    async with _runs(folder, [0, finished]) as runs:
        old = runs[finished]
        await old.finish(10_000)
        before = old.memory_bytes()
        await old.finish(finished)
        old.wait_until_calm()
        flat.bytes_per_finished, flat.count = round((old.memory_bytes() - before) / finished, 2), finished
        flat.finished = await _in_turns(runs)
    return flat


@asynccontextmanager
async def _runs(folder: Path, names: Sequence[int]) -> AsyncIterator[dict[int, _Run]]:
    """A run on a server of its own for each name."""
    async with AsyncExitStack() as stack:
        runs = {}
        for name in names:
            server = stack.enter_context(EmbeddedServer(Path(stack.enter_context(TemporaryDirectory(dir=folder)))))
            runs[name] = await stack.enter_async_context(_Run(server, f"flat-{name}"))
        yield runs


async def _in_turns(runs: Mapping[int, _Run]) -> dict[int, list[float]]:
    samples: dict[int, list[float]] = {name: [] for name in runs}
    for turn in range(SAMPLES + 1):
        for name, run in runs.items():
            figure = await run.sample()
            if turn:  # the first one warms up
                samples[name].append(figure)
    return samples


def _powers(first: int, most: int) -> list[int]:
    counts = [first]
    while counts[-1] * 10 <= most:
        counts.append(counts[-1] * 10)
    return counts
