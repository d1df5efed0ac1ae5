"""The learner's loop, without Ray.

::

    ledger ── lease ──► intake ── samples ──► backend.step (a thread; leases are extended meanwhile)
      ▲                    │                        │
      └── drop(reason) ────┘                        ▼ every publish_every steps
                                       publisher: stage ► manifest ► commit ► (checkpoint ► settle) ► retain

`step` consumes ready groups and waits for the rollout workers; it is unblocked by their puts, or by
`batch_deadline_s`, which ends the run by name. Nothing waits for the learner but admission (P20).

Owns the order of these calls and the fates of what was consumed. A bad group is dropped with a reason; a bad step,
a refused commit and a lost fence are raised. After any error the learner is done: its fence holder starts another.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from headrace.platform.config.learner import LearnerConfig
from headrace.platform.contracts import Algorithm, Clock, LearnerBackend, Ledger, VersionRegistry
from headrace.platform.errors import LedgerError, RunFailed
from headrace.platform.records.status import Fate
from headrace.platform.records.tables import Receipt
from headrace.trainer.checkpoint import CheckpointStore
from headrace.trainer.intake import Intake, OpenedGroup, ReadEpisodes
from headrace.trainer.publisher import Publisher
from headrace.trainer.report import StepReport
from headrace.trainer.step_statistics import EpisodeStatistics, StepStatistics

T = TypeVar("T")
_log = logging.getLogger(__name__)

EXTEND_EVERY_S = 20.0
"""How often held leases are renewed; well below any sensible lease."""


def _forget(receipts: Sequence[Receipt]) -> None:
    """Receipts that nobody stores."""


class Learner:
    """See the module.

    Args:
        run: run id, used as holder name.
        config: batch size, publishing and checkpoints.
        max_lag: `queue.max_lag`, judged again at train start (P14).
        backend: holds the weights.
        algorithm: advantages and loss.
        ledger: the run's queue and head.
        registry: where versions go.
        read_episodes: reads payloads that the ledger no longer keeps.
        checkpoints: where complete checkpoints go.
        policy_id: of the versions published.
        clock: seconds since the epoch.
        on_receipts: stores the receipts of a version, before the commit that makes it exist.
        inline: compute on the event loop and poll without sleeping: the in-process runtime is deterministic then.
        extend_every_s: how often held leases are renewed.
    """

    def __init__(
        self,
        *,
        run: str,
        config: LearnerConfig,
        max_lag: int,
        backend: LearnerBackend,
        algorithm: Algorithm,
        ledger: Ledger,
        registry: VersionRegistry,
        read_episodes: ReadEpisodes,
        checkpoints: CheckpointStore,
        policy_id: str,
        clock: Clock,
        on_receipts: Callable[[Sequence[Receipt]], None] = _forget,
        inline: bool = False,
        extend_every_s: float = EXTEND_EVERY_S,
    ) -> None:
        self._run = run
        self._config = config
        self._backend = backend
        self._algorithm = algorithm
        self._ledger = ledger
        self._clock = clock
        self._on_receipts = on_receipts
        self._inline = inline
        self._extend_every_s = extend_every_s
        self._intake = Intake(
            config=config,
            max_lag=max_lag,
            algorithm=algorithm,
            ledger=ledger,
            read_episodes=read_episodes,
            clock=clock,
            inline=inline,
        )
        self._publisher = Publisher(
            ledger=ledger,
            registry=registry,
            checkpoints=checkpoints,
            policy_id=policy_id,
            keep_versions=config.keep_versions,
            clock=clock,
            compute=self._compute,
        )
        self._held: set[int] = set()
        self._trained: list[tuple[OpenedGroup, Mapping[str, EpisodeStatistics]]] = []
        self._unpublished = 0
        self._published = 0
        self._steps = 0

    @property
    def version(self) -> int:
        """The head; -1 before `start`."""
        return self._publisher.head

    @property
    def steps(self) -> int:
        """Learner steps done, those before a resume included."""
        return self._steps

    async def start(self, initial_files: Mapping[str, bytes] | None = None) -> int:
        """Take the run over; returns the head.

        A new run publishes version 0 from `initial_files`, or from the backend's weights, with a checkpoint. A run
        that has a head goes on from its newest complete checkpoint (P6).
        """
        if await self._publisher.take_over(f"{self._run}-learner"):
            state, files = await self._publisher.resume()
            await self._compute(self._backend.restore, files)
            self._steps = state.steps
            return self.version
        if initial_files is None:
            initial_files = await self._compute(self._backend.weights)
        number = await self._publisher.reserve()
        await self._publisher.publish(number, initial_files, batches=0, fates={}, episode_files=())
        await self._publisher.settle(await self._compute(self._backend.save), self._steps)
        return self.version

    async def step(self) -> StepReport:
        """One learner batch, from lease to commit.

        Raises:
            RunFailed: no batch came, the step is not finite (the message names the episodes), or a refused commit.
            Fenced: another learner holds the run.
        """
        async with self._leases_extended():
            began = self._clock()
            opened, dropped, busy_from = await self._next_batch(began)
            samples = [s for group in opened for member in group.members for s in member.samples]
            try:
                statistics = await self._compute(self._backend.step, samples, self._algorithm)
            except ArithmeticError as error:
                raise RunFailed(f"the learner step is not finite, the weights are as before: {error}") from error
            self._steps += 1
            self._unpublished += 1
            episodes = statistics.episodes if isinstance(statistics, StepStatistics) else {}
            self._trained += [(group, episodes) for group in opened]
            batches = self._publisher.batches + self._unpublished
            due = self._unpublished >= self._config.publish_every or self._steps == self._config.steps
            if due:
                await self._publish()
        members = [member for group in opened for member in group.members]
        return StepReport(
            step=self._steps,
            version=self.version,
            published=due,
            batches=batches,
            groups=len(opened),
            episodes=len(members),
            loss_tokens=int(statistics["loss_tokens"]),
            loss=statistics["loss"],
            kl=statistics.get("kl", 0.0),
            clip_share=statistics.get("clip_share", 0.0),
            ratio_mean=statistics.get("ratio_mean", 1.0),
            grad_norm=statistics.get("grad_norm", 0.0),
            lr=statistics.get("lr", 0.0),
            score_mean=sum(member.score for member in members) / len(members),
            lags=dict(sorted(Counter(member.lag for member in members).items())),
            busy=(busy_from, self._clock()),
            wait_s=busy_from - began,
            dropped=dict(dropped),
        )

    def keep(self, versions: Sequence[int]) -> None:
        """Keep the weights of exactly these versions, however old: the best one, those under evaluation."""
        self._publisher.kept = frozenset(versions)

    async def close(self) -> None:
        """Give back what was leased and never published. Safe to call twice, and after an error."""
        held, self._held = sorted(self._held), set()
        if held:
            try:
                await self._ledger.release(self._publisher.fence, held)
            except LedgerError as error:
                _log.warning("could not release groups %s: %s", held, error)

    async def _next_batch(self, began: float) -> tuple[list[OpenedGroup], Counter[str], float]:
        """Groups to train on, what was dropped on the way, and when work on them began."""
        publisher, dropped = self._publisher, Counter[str]()
        while True:
            deadline = began + self._config.batch_deadline_s
            leased = await self._intake.lease(publisher.fence, publisher.head, self._unpublished, deadline)
            busy_from = self._clock()
            if again := self._held.intersection(group.group for group in leased):
                raise RunFailed(f"the leases of groups {sorted(again)} ran out before they were committed")
            self._held.update(group.group for group in leased)
            opened, refused = await self._intake.open(
                leased, publisher.batches_of, publisher.batches + self._unpublished
            )
            for group in refused:
                _log.warning("group %d dropped (%s): %s", group.group, group.reason, group.detail)
                await self._ledger.drop(publisher.fence, [group.group], group.reason)
                self._held.discard(group.group)
                dropped[group.reason.value] += 1
            if opened:
                return opened, dropped, busy_from

    async def _publish(self) -> None:
        """Publish the present weights over all that was trained since the head, and settle when it is time."""
        publisher = self._publisher
        number = await publisher.reserve()
        members = [member for group, _ in self._trained for member in group.members]
        self._on_receipts(self._receipts(number))
        await publisher.publish(
            number,
            await self._compute(self._backend.weights),
            batches=self._unpublished,
            fates={member.episode.episode_id: Fate.TRAINED.value for member in members},
            episode_files=sorted({member.store_file for member in members if member.store_file}),
        )
        self._trained, self._unpublished = [], 0
        self._held.clear()
        self._published += 1
        if self._published % self._config.checkpoint_every == 0 or self._steps == self._config.steps:
            await publisher.settle(await self._compute(self._backend.save), self._steps)
        await publisher.retain()

    def _receipts(self, version: int) -> list[Receipt]:
        receipts = []
        for group, statistics in self._trained:
            for member in group.members:
                own = statistics.get(member.episode.episode_id, EpisodeStatistics(0, 1.0, 0.0))
                receipts.append(
                    Receipt(
                        episode_id=member.episode.episode_id,
                        version=version,
                        advantages=member.advantages,
                        loss_tokens=own.loss_tokens,
                        ratio_mean=own.ratio_mean,
                        clip_share=own.clip_share,
                        lag=member.lag,
                    )
                )
        return receipts

    async def _compute(self, function: Callable[..., T], *arguments: Any) -> T:
        if self._inline:
            return function(*arguments)
        return await asyncio.to_thread(function, *arguments)

    @asynccontextmanager
    async def _leases_extended(self) -> AsyncIterator[None]:
        """Renew held leases now, for the time since the last step may have been long, and regularly until the end."""
        await self._renew()
        task = asyncio.create_task(self._renew_regularly())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _renew_regularly(self) -> None:
        while True:
            await asyncio.sleep(self._extend_every_s)
            await self._renew()

    async def _renew(self) -> None:
        """A failure is told by what comes after: the next lease, or the commit, which checks every lease (P7)."""
        if self._held:
            try:
                await self._ledger.extend(self._publisher.fence, sorted(self._held))
            except LedgerError as error:
                _log.warning("could not renew the learner's leases: %s", error)
