"""From the ledger to samples: waits for a batch, opens what it gets, and refuses what does not hold together.

A bad group is data: it is returned with a reason and its siblings go on. A batch that does not come is a failure of
the run, and the error says what the queue looked like (cases E8, E9).
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from headrace.platform.config.learner import LearnerConfig
from headrace.platform.contracts import Algorithm, Clock, Ledger, ScoredEpisode
from headrace.platform.errors import FidelityError, RunFailed
from headrace.platform.fidelity import check_episode
from headrace.platform.ledger.policy import batch_target
from headrace.platform.records.codec import episode_codec
from headrace.platform.records.delivery import LeasedGroup, LedgerStats
from headrace.platform.records.episode import Episode
from headrace.platform.records.status import DropReason
from headrace.trainer.samples import Sample, build_samples

ReadEpisodes = Callable[[str, Sequence[str]], Awaitable[Sequence[bytes]]]
"""(store file, episode ids) to payloads in the order of the ids."""

FIRST_PAUSE_S = 0.005
LONGEST_PAUSE_S = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenedMember:
    """An episode of the batch: its samples, one advantage per policy turn, and its lag at train start (P14)."""

    episode: Episode
    score: float
    lag: int
    advantages: tuple[float, ...]
    samples: tuple[Sample, ...]
    store_file: str


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenedGroup:
    """A leased group, decoded and checked."""

    group: int
    members: tuple[OpenedMember, ...]


@dataclass(frozen=True, slots=True)
class RefusedGroup:
    """A leased group that is not trained, why, and what to write in the log."""

    group: int
    reason: DropReason
    detail: str


class Intake:
    """See the module. `inline` polls without sleeping, for a deterministic event loop."""

    def __init__(
        self,
        *,
        config: LearnerConfig,
        max_lag: int,
        algorithm: Algorithm,
        ledger: Ledger,
        read_episodes: ReadEpisodes,
        clock: Clock,
        inline: bool,
    ) -> None:
        self._config = config
        self._max_lag = max_lag
        self._algorithm = algorithm
        self._ledger = ledger
        self._read_episodes = read_episodes
        self._clock = clock
        self._inline = inline

    async def lease(self, fence: int, parent: int, ahead: int, deadline: float) -> Sequence[LeasedGroup]:
        """The next batch; at least one group.

        Args:
            fence: the learner's.
            parent: the published version that the weights come from.
            ahead: learner batches applied since then.
            deadline: when to give up, on the clock.

        Raises:
            RunFailed: no batch came in time, or none can come any more.
            Fenced: another learner holds the run.
        """
        pause_s, began = FIRST_PAUSE_S, self._clock()
        while True:
            stats = await self._ledger.stats()
            count = batch_target(
                stats.groups_ready,
                stats.zero_variance_since_commit,
                self._config.batch_groups,
                self._config.oversample_max,
            )
            groups = await self._ledger.lease(fence, parent, ahead, count)
            if groups:
                return groups
            if stats.stopped:
                raise RunFailed(f"the run was stopped while the learner waited for a batch; {_describe(stats)}")
            if self._clock() >= deadline:
                raise RunFailed(
                    f"no batch of {count} groups within {self._clock() - began:.1f} s (learner.batch_deadline_s);"
                    f" {_describe(stats)}"
                )
            await asyncio.sleep(0 if self._inline else pause_s)
            pause_s = min(pause_s * 2, LONGEST_PAUSE_S)

    async def open(
        self, groups: Sequence[LeasedGroup], batches_of: Mapping[int, int], batches: int
    ) -> tuple[list[OpenedGroup], list[RefusedGroup]]:
        """Decode, check and credit each group.

        Args:
            groups: as leased.
            batches_of: B of the versions that this learner knows (P14).
            batches: B of the weights about to receive the gradient.
        """
        payloads = await self._payloads(groups)
        opened: list[OpenedGroup] = []
        refused: list[RefusedGroup] = []
        for group in groups:
            lags = [
                batches - batches_of[member.oldest_version] if member.oldest_version in batches_of else group.lag
                for member in group.members
            ]
            if max(lags) > self._max_lag:
                refused.append(RefusedGroup(group.group, DropReason.LAG, f"lag {max(lags)} at train start"))
                continue
            try:
                opened.append(self._open(group, lags, payloads))
            except ValueError as error:
                refused.append(RefusedGroup(group.group, DropReason.FIDELITY, str(error)))
        return opened, refused

    def _open(self, group: LeasedGroup, lags: Sequence[int], payloads: Mapping[str, bytes]) -> OpenedGroup:
        """Raises ValueError (FidelityError and SchemaError are ones) for whatever does not hold together."""
        scored = []
        for member in group.members:
            episode = episode_codec.decode(payloads[str(member.attempt_id)])
            check_episode(episode)
            if episode.attempt_id != member.attempt_id or episode.oldest_version not in (None, member.oldest_version):
                raise FidelityError(f"identity: {episode.episode_id} was put as {member.attempt_id}")
            scored.append(ScoredEpisode(episode, member.score))
        advantages = self._algorithm.advantages(scored)
        members = tuple(
            OpenedMember(
                episode=one.episode,
                score=one.score,
                lag=lag,
                advantages=tuple(values),
                samples=tuple(build_samples(one.episode, values, lag)),
                store_file=member.store_file,
            )
            for one, member, lag, values in zip(scored, group.members, lags, advantages, strict=True)
        )
        if not any(sample.loss_tokens for member in members for sample in member.samples):
            raise FidelityError("actions: no token of the group was sampled by the policy")
        return OpenedGroup(group=group.group, members=members)

    async def _payloads(self, groups: Sequence[LeasedGroup]) -> dict[str, bytes]:
        """Payloads by episode id; from the episode store where the ledger keeps the id only (P9)."""
        found: dict[str, bytes] = {}
        elsewhere: dict[str, list[str]] = {}
        for group in groups:
            for member in group.members:
                if member.payload:
                    found[str(member.attempt_id)] = member.payload
                else:
                    elsewhere.setdefault(member.store_file, []).append(str(member.attempt_id))
        for store_file, ids in elsewhere.items():
            found.update(zip(ids, await self._read_episodes(store_file, ids), strict=True))
        return found


def _describe(stats: LedgerStats) -> str:
    fates = ", ".join(f"{fate} {count}" for fate, count in sorted(stats.fates.items()) if count)
    return (
        f"the queue has {stats.groups_open} groups being played, {stats.groups_ready} ready, {stats.groups_leased}"
        f" leased; {stats.zero_variance_since_commit} without variance since the last commit; head"
        f" {stats.head}; of {stats.dispatched} attempts dispatched: {fates or 'none'}"
    )
