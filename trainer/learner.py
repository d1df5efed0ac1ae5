"""The learner's loop, without Ray.

::

    ledger ── lease ──► intake ── samples ──► ranks agree ──► backend.step (a thread)
      ▲       (paced)      │                                      │
      └── drop(reason) ────┘                                      ▼ every publish_every steps
                               publisher: stage ► manifest ► commit ► (checkpoint ► settle ► retain) ► retain

`step` consumes ready groups and waits for the rollout workers; it is unblocked by their puts, or by
`batch_deadline_s`, which ends the run by name. The pacer may hold it for groups that are about to be too old (P15,
P16), never longer than its bounds. Nothing waits for the learner but admission (P20).

From `start` to `close` a heartbeat renews the held leases and keeps the run from other learners (P12).

Owns the order of these calls and the fates of what was consumed. A bad group is dropped with a reason; a bad step,
a refused commit, a lost fence and a server that stays away are raised. After any error the learner is done: its
groups stay counted as delivered (P3, poison), and its fence's holder starts another.
"""

import asyncio
import logging
import os
import secrets
import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from headrace.platform.config.episode_queue import QueueConfig
from headrace.platform.config.learner import LearnerConfig
from headrace.platform.contracts import Algorithm, Clock, LearnerBackend, Ledger, VersionRegistry
from headrace.platform.errors import CommitRefused, DeadlineExceeded, LedgerAway, LedgerError, PartDied, RunFailed
from headrace.platform.observability.parts import Part
from headrace.platform.records.tables import LossMaskReason, Receipt
from headrace.trainer.bad_step import BadStep, keep_bad
from headrace.trainer.checkpoint import CheckpointStore
from headrace.trainer.consumption import NOTHING, TrainedGroup, consumption, receipts
from headrace.trainer.crediting import credited
from headrace.trainer.gap import Gap, GapAlarm, alarms
from headrace.trainer.heartbeat import Heartbeat
from headrace.trainer.intake import Intake, OpenedGroup, ReadEpisodes, ReadRewards
from headrace.trainer.lora import first_files
from headrace.trainer.observations import ContentSpan
from headrace.trainer.one_step import restore_step, samples_of, saved_step
from headrace.trainer.publisher import Offer, Publisher
from headrace.trainer.ranks import Gather, agree, alone, step_digest
from headrace.trainer.report import TERMS, StepReport
from headrace.trainer.staleness import TrainStart
from headrace.trainer.step_statistics import StepStatistics

T = TypeVar("T")
_log = logging.getLogger(__name__)


def _forget(rows: Sequence[Receipt]) -> None:
    """Receipts that nobody stores."""


class Learner:
    """See the module.

    Args:
        run: run id, part of the holder's name.
        config: batch size, publishing and checkpoints.
        queue: the lag limit, judged again at train start (P14), and what happens at it (P15, P16).
        backend: holds the weights.
        algorithm: advantages and loss.
        ledger: the run's queue and head.
        registry: where versions go.
        read_episodes: reads payloads that the ledger no longer keeps.
        read_rewards: reads reward rows, for algorithms that need more than scores.
        content: see `Intake`.
        checkpoints: where complete checkpoints go.
        policy_id: of the versions published.
        clock: seconds since the epoch.
        on_receipts: stores the receipts of a version, before the commit that makes it exist.
        on_bad_step: keeps a step that was not finite for study; returns where.
        gather: brings the ranks' digests together (P13).
        world_size: how many ranks there are; a checkpoint of another number is refused.
        offer: see `Publisher`.
        part: says what the learner does and waits for.
        inline: compute on the event loop and poll without sleeping: the in-process runtime is deterministic then.
    """

    def __init__(
        self,
        *,
        run: str,
        config: LearnerConfig,
        queue: QueueConfig,
        backend: LearnerBackend,
        algorithm: Algorithm,
        ledger: Ledger,
        registry: VersionRegistry,
        read_episodes: ReadEpisodes,
        checkpoints: CheckpointStore,
        policy_id: str,
        clock: Clock,
        read_rewards: ReadRewards | None = None,
        content: ContentSpan | None = None,
        on_receipts: Callable[[Sequence[Receipt]], None] = _forget,
        on_bad_step: Callable[[BadStep], str] | None = None,
        gather: Gather = alone,
        world_size: int = 1,
        offer: Offer | None = None,
        part: Part | None = None,
        inline: bool = False,
    ) -> None:
        self.holder = f"{run}-learner on {socket.gethostname()} pid {os.getpid()} boot {secrets.token_hex(4)}"
        self._config = config
        self._backend = backend
        self._algorithm = algorithm
        self._ledger = ledger
        self._clock = clock
        self._on_receipts = on_receipts
        self._on_bad_step = on_bad_step
        self._gather = gather
        self._part = part
        self._inline = inline
        self._heartbeat = Heartbeat(ledger, lambda: self.held, queue.learner_term_s / 3)
        self._intake = Intake(
            config=config,
            queue=queue,
            algorithm=algorithm,
            ledger=ledger,
            read_episodes=read_episodes,
            read_rewards=read_rewards,
            clock=clock,
            say=self._say,
            inline=inline,
            content=content,
        )
        self._publisher = Publisher(
            ledger=ledger,
            registry=registry,
            checkpoints=checkpoints,
            policy_id=policy_id,
            keep_versions=config.keep_versions,
            keep_checkpoints=config.keep_checkpoints,
            world_size=world_size,
            clock=clock,
            compute=self._compute,
            offer=offer,
        )
        self._max_lag, self._gap_limit = queue.max_lag, config.gap_limit
        self._held: set[int] = set()
        self._trained: list[TrainedGroup] = []
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

    @property
    def held(self) -> Sequence[int]:
        """The groups that this learner knows to be leased to it; what else the ledger believes so was a lost reply."""
        return sorted(self._held)

    async def start(self, initial_files: Mapping[str, bytes] | None = None, takeover: bool = False) -> int:
        """Take the run over; returns the head.

        A new run publishes version 0 from `initial_files`, or from the backend's weights, with a checkpoint; one that
        died before that checkpoint was whole does so again, under a new number. A run that has a checkpoint goes on
        from the newest complete one (P6). `takeover`: the caller knows that the last learner is gone.

        Raises:
            Fenced: another learner is alive.
            RunFailed: there is nothing to resume from.
        """
        self._say("starting", "the run, from its last learner")
        await self._publisher.take_over(self.holder, takeover)
        self._heartbeat.start(self._publisher.fence)
        try:
            return await self._begin(initial_files)
        except BaseException:
            await self._heartbeat.stop()
            raise

    async def step(self) -> StepReport:
        """One learner batch, from lease to commit.

        Raises:
            RunFailed: no batch came, the step is not finite (the message names the episodes), the ranks disagree, or a
                ledger that stayed away.
            CommitRefused: a commit was refused, or would be, as leases ran out (P7). The next learner begins at the
                newest checkpoint and is given the groups again.
            PartDied: one of the ranks is lost (P13). The same holds; the groups were given back.
            Fenced: another learner holds the run, or it was stopped.
        """
        try:
            return await self._step()
        except BaseException as error:
            await self._heartbeat.stop()
            if isinstance(error, PartDied):  # P13: the groups go to whoever comes next
                await self.close()
            if isinstance(error, LedgerAway | DeadlineExceeded):
                raise RunFailed(f"learner step {self._steps + 1}: the ledger's server stayed away: {error}") from error
            raise

    def keep(self, versions: Sequence[int]) -> None:
        """Keep the weights of exactly these versions, however old: the best one, those under evaluation."""
        self._publisher.kept = frozenset(versions)

    async def close(self) -> None:
        """Give back what was leased and never published. Safe to call twice, and after an error."""
        await self._heartbeat.stop()
        held, self._held = sorted(self._held), set()
        if held:
            try:
                await self._ledger.release(self._publisher.fence, held)
            except (LedgerError, DeadlineExceeded) as error:
                _log.warning("could not release groups %s: %s", held, error)

    async def _begin(self, initial_files: Mapping[str, bytes] | None) -> int:
        """Resume, or publish the initial weights and settle them."""
        publisher = self._publisher
        if found := await publisher.resume():
            state, files = found
            self._say(f"restoring checkpoint {state.version}")
            await self._compute(restore_step, self._backend, self._algorithm, files)
            self._steps = state.steps
            return self.version
        if initial_files is None:
            initial_files = await self._compute(first_files, self._backend)
        number = await publisher.reserve()
        self._say(f"publishing version {number}")
        await publisher.publish(number, initial_files, batches=0, consumed=NOTHING)
        await self._settle()
        return self.version

    async def _step(self) -> StepReport:
        await self._heartbeat.renew()  # on a loop that computes, the heartbeat may be late
        self._intake.pacer.begin_step()
        began = self._clock()
        opened, dropped, busy_from = await self._next_batch(began)
        start = self._publisher.train_start(self._unpublished)
        opened, statistics = await self._train(opened)
        self._algorithm.observe([[member.scored for member in group.members] for group in opened])
        self._steps += 1
        self._unpublished += 1
        episodes = statistics.episodes if isinstance(statistics, StepStatistics) else {}
        self._trained += [TrainedGroup(group, episodes, self._steps) for group in opened]
        batches = self._publisher.batches + self._unpublished
        gaps = self._gaps(statistics, start)
        due = self._unpublished >= self._config.publish_every or self._steps == self._config.steps
        if due:
            await self._publish()
        self._say(f"step {self._steps} done", "the next step")
        members = [member for group in opened for member in group.members]
        live = [member for member in members if member.live]
        return StepReport(
            step=self._steps,
            version=self.version,
            published=due,
            batches=batches,
            groups=len(opened),
            episodes=len(live),
            loss_tokens=int(statistics["loss_tokens"]),
            masked_tokens=sum(
                span.end - span.start
                for member in members
                for span in member.masked
                if span.reason is LossMaskReason.LAG
            ),
            loss=statistics["loss"],
            kl=statistics.get("kl", 0.0),
            clip_share=statistics.get("clip_share", 0.0),
            ratio_mean=statistics.get("ratio_mean", 1.0),
            grad_norm=statistics.get("grad_norm", 0.0),
            lr=statistics.get("lr", 0.0),
            score_mean=sum(member.score for member in members) / len(members),
            lags=dict(sorted(Counter(member.lag for member in live).items())),
            busy=(busy_from, self._clock()),
            wait_s=busy_from - began,
            held_s=self._intake.pacer.held_s,
            length_bias=self._intake.pacer.length_bias,
            dropped=dict(dropped),
            gaps=gaps,
            alarms=self._alarms(gaps),
            terms={name: statistics[name] for name in TERMS if name in statistics},
            **self._off_policy(statistics),
        )

    def _off_policy(self, statistics: Mapping[str, float]) -> dict[str, Any]:
        if not isinstance(statistics, StepStatistics) or statistics.off_policy is None:
            return {}
        if warning := statistics.off_policy.warning:
            _log.warning("learner step %d: %s", self._steps, warning)
        return {
            "off_policy": statistics.off_policy,
            "by_lag": statistics.by_lag,
            "by_length": statistics.by_length,
        }

    def _gaps(self, statistics: Mapping[str, float], start: TrainStart) -> tuple[Gap, ...]:
        if not isinstance(statistics, StepStatistics):
            return ()
        limit = self._max_lag
        lags = {gap.version: start.lag(gap.version, limit, limit + 1) for gap in statistics.gaps}
        return tuple(msgspec.structs.replace(gap, lag=lags[gap.version]) for gap in statistics.gaps)

    def _alarms(self, gaps: Sequence[Gap]) -> tuple[GapAlarm, ...]:
        found = alarms(gaps, self._gap_limit)
        for alarm in found:
            _log.error("%s", alarm)
        return tuple(found)

    async def _next_batch(self, began: float) -> tuple[list[OpenedGroup], Counter[str], float]:
        """Groups to train on, what was dropped on the way, and when work on them began."""
        publisher, dropped = self._publisher, Counter[str]()
        while True:
            start = publisher.train_start(self._unpublished)
            leased = await self._intake.lease(publisher.fence, start, began, self._steps + 1)
            busy_from = self._clock()
            if again := self._held.intersection(group.group for group in leased):
                raise CommitRefused(f"the leases of groups {sorted(again)} ran out before they were committed")
            self._held.update(group.group for group in leased)
            opened, refused = await self._intake.open(leased, start)
            for group in refused:
                _log.warning("group %d dropped (%s): %s", group.group, group.reason, group.detail)
                await self._ledger.drop(publisher.fence, [group.group], group.reason)
                self._held.discard(group.group)
                dropped[group.reason.value] += 1
            if opened:
                return opened, dropped, busy_from

    async def _train(self, opened: list[OpenedGroup]) -> tuple[list[OpenedGroup], Mapping[str, float]]:
        """One optimizer step, once every rank is about to take the same one; the groups as they were credited."""
        members = [member for group in opened for member in group.members]
        step = self._steps + 1
        digest = step_digest([member.episode.episode_id for member in members], self.version, step)
        self._say(f"training step {step}")
        try:
            await self._compute(agree, digest, self._gather)  # P13
            opened = await self._compute(credited, self._backend, self._algorithm, opened)
            return opened, await self._compute(self._backend.step, samples_of(opened), self._algorithm)
        except RunFailed:  # the ranks disagree, here or among themselves
            await self.close()
            raise
        except ArithmeticError as error:
            place = {"step": step, "version": self.version, "ahead": self._unpublished}
            facts = {**place, "error": str(error), "config": self._config, "groups": opened}
            kept = await self._compute(keep_bad, self._on_bad_step, facts, self._backend.weights)
            raise RunFailed(f"the learner step is not finite, the weights are as before: {error}{kept}") from error

    async def _publish(self) -> None:
        """Publish the present weights over all that was trained since the head, and settle when it is time."""
        publisher = self._publisher
        number = await publisher.reserve()
        self._say(f"publishing version {number}")
        rows = receipts(self._trained, number)
        await publisher.durably(lambda: self._compute(self._on_receipts, rows))
        await publisher.publish(
            number,
            await self._compute(self._backend.weights),
            batches=self._unpublished,
            consumed=consumption(self._trained, number),
        )
        self._trained, self._unpublished = [], 0
        self._held.clear()
        self._published += 1
        if self._published % self._config.checkpoint_every == 0 or self._steps == self._config.steps:
            await self._settle()
        await publisher.retain()

    async def _settle(self) -> None:
        self._say(f"writing checkpoint {self.version}")
        await self._publisher.settle(await self._compute(saved_step, self._backend, self._algorithm), self._steps)

    async def _compute(self, function: Callable[..., T], *arguments: Any) -> T:
        if self._inline:
            return function(*arguments)
        return await asyncio.to_thread(function, *arguments)

    def _say(self, state: str, waiting_for: str = "", **figures: int) -> None:
        if self._part is not None:
            self._part.set(state, waiting_for)
            self._part.note(**figures)
