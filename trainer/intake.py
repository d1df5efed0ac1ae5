"""From the ledger to samples: waits for a batch, opens what it gets, and refuses what does not hold together.

A bad group is data: it is returned with a reason and its siblings go on. A batch that does not come is a failure of
the run, and the error says what the queue looked like (cases E8, E9). Here stands what becomes of tokens over the lag
limit at train start (P15): under `mask` they leave the loss and their episode's reward stays in the baseline, else
the member leaves, and the group with it when too few stay.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from headrace.platform.config.episode_queue import QueueConfig
from headrace.platform.config.learner import LearnerConfig
from headrace.platform.contracts import Algorithm, Clock, Ledger, ScoredEpisode
from headrace.platform.errors import FidelityError, RunFailed
from headrace.platform.fidelity import check_episode
from headrace.platform.hashing import digest
from headrace.platform.ledger.policy import batch_target
from headrace.platform.records.codec import episode_codec
from headrace.platform.records.delivery import LeasedGroup, LeasedMember, LedgerStats
from headrace.platform.records.episode import Episode
from headrace.platform.records.status import DropReason
from headrace.platform.records.tables import MaskedSpan, RewardRow
from headrace.trainer.observations import ContentSpan
from headrace.trainer.pacing import Pacer
from headrace.trainer.samples import Sample, build_samples, inherited_spans
from headrace.trainer.staleness import Staleness, TrainStart, staleness

ReadEpisodes = Callable[[str, Sequence[str]], Awaitable[Sequence[bytes]]]
"""(store file, episode ids) to payloads in the order of the ids."""

ReadRewards = Callable[[Sequence[str]], Awaitable[Mapping[str, Sequence[RewardRow]]]]
"""Episode ids to the reward rows that count, by episode id."""

Rewards: TypeAlias = Mapping[str, Sequence[RewardRow]]

Say: TypeAlias = Callable[..., None]
"""(state, what is waited for, figures by name): what the learner does now, for `headrace status`."""

FIRST_PAUSE_S = 0.005
LONGEST_PAUSE_S = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenedMember:
    """An episode of the batch: its samples and one advantage per policy turn.

    `lag` is that of its oldest token within the limit, at train start (P14); `masked` are the tokens over it. A member
    that is not `live` has no token within it: only its reward counts, in the baseline of the others (P15).
    """

    leased: LeasedMember
    scored: ScoredEpisode
    lag: int
    masked: tuple[MaskedSpan, ...]
    live: bool
    advantages: tuple[float, ...]
    samples: tuple[Sample, ...]

    @property
    def episode(self) -> Episode:
        """What was played."""
        return self.scored.episode

    @property
    def score(self) -> float:
        """The sum of its rewards."""
        return self.scored.score


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenedGroup:
    """A leased group, decoded and checked. `members` are those that stayed."""

    leased: LeasedGroup
    members: tuple[OpenedMember, ...]


@dataclass(frozen=True, slots=True)
class RefusedGroup:
    """A leased group that is not trained, why, and what to write in the log."""

    group: int
    reason: DropReason
    detail: str


@dataclass(frozen=True, slots=True)
class _Judged:
    leased: LeasedMember
    scored: ScoredEpisode
    staleness: Staleness


class Intake:
    """See the module. `inline` polls without sleeping, for a deterministic event loop. `content` tells an observation's
    content, where the environment's tokens enter the loss."""

    def __init__(
        self,
        *,
        config: LearnerConfig,
        queue: QueueConfig,
        algorithm: Algorithm,
        ledger: Ledger,
        read_episodes: ReadEpisodes,
        read_rewards: ReadRewards | None,
        clock: Clock,
        say: Say,
        inline: bool,
        content: ContentSpan | None = None,
    ) -> None:
        if config.environment_loss.coefficient and content is None:
            raise ValueError(
                "learner.environment_loss needs to know what of an observation is content, and is not told"
            )
        self._content = content
        self._config = config
        self._queue = queue
        self._algorithm = algorithm
        self._ledger = ledger
        self._read_episodes = read_episodes
        self._read_rewards = read_rewards
        self._clock = clock
        self._say = say
        self._inline = inline
        self.pacer = Pacer(queue, clock())

    async def lease(self, fence: int, start: TrainStart, began: float, step: int) -> Sequence[LeasedGroup]:
        """The next batch; at least one group.

        Args:
            fence: the learner's.
            start: the weights about to receive the gradient.
            began: when the step began, on the clock; `batch_deadline_s` later the run fails, not counting the time
                for which the pacer held the step.
            step: the number of the step that the batch is for.

        Raises:
            RunFailed: no batch came in time, or none can come any more.
            Fenced: another learner holds the run.
        """
        pause_s = FIRST_PAUSE_S
        while True:
            stats = await self._ledger.stats()
            count = batch_target(
                stats.groups_ready,
                stats.zero_variance_since_commit,
                self._config.batch_groups,
                self._config.oversample_max,
            )
            if not await self._held(fence, start, count, stats, step):
                if groups := await self._ledger.lease(fence, start.parent, start.ahead, count):
                    return groups
                figures = {"ready": stats.groups_ready, "playing": stats.groups_open}
                self._say(f"step {step}", f"a batch of {count} groups", **figures)
            if stats.stopped:
                raise RunFailed(f"the run was stopped while the learner waited for a batch; {_describe(stats)}")
            waited_s = self._clock() - began - self.pacer.held_s
            if waited_s >= self._config.batch_deadline_s:
                raise RunFailed(
                    f"no batch of {count} groups within {waited_s:.1f} s (learner.batch_deadline_s); {_describe(stats)}"
                )
            await asyncio.sleep(0 if self._inline else pause_s)
            pause_s = min(pause_s * 2, LONGEST_PAUSE_S)

    async def _held(self, fence: int, start: TrainStart, count: int, stats: LedgerStats, step: int) -> bool:
        """Whether the step must wait for groups that it would push over the limit (P15, P16).

        Not before a batch is there, for until then it waits anyway; but a lease that may close groups early (P18)
        makes its own batch.
        """
        if not self.pacer.asks or stats.stopped or (stats.groups_ready < count and not self._queue.early_missing):
            return False
        risk = await self._ledger.at_risk(fence, start.parent, start.ahead, count)
        if self.pacer.may_start(risk, self._clock()):
            return False
        figures = {"at_risk": risk.playing + risk.ready, "protected": risk.protected}
        self._say(f"holding step {step}", "groups that it would push over the lag limit", **figures)
        return True

    async def open(
        self, groups: Sequence[LeasedGroup], start: TrainStart
    ) -> tuple[list[OpenedGroup], list[RefusedGroup]]:
        """Decode, check, judge and credit each group.

        Args:
            groups: as leased.
            start: the weights about to receive the gradient.
        """
        payloads, rewards = await self._payloads(groups), await self._rewards(groups)
        opened: list[OpenedGroup] = []
        refused: list[RefusedGroup] = []
        for group in groups:
            try:
                result = self._open(group, start, payloads, rewards)
            except ValueError as error:
                result = RefusedGroup(group.group, DropReason.FIDELITY, str(error))
            if isinstance(result, OpenedGroup):
                opened.append(result)
            else:
                refused.append(result)
        return opened, refused

    def _open(
        self, group: LeasedGroup, start: TrainStart, payloads: Mapping[str, bytes], rewards: Rewards
    ) -> OpenedGroup | RefusedGroup:
        """Raises ValueError (FidelityError and SchemaError are ones) for whatever does not hold together."""
        judged = [self._judge(group, member, start, payloads, rewards) for member in group.members]
        stay = self._staying(judged)
        if reason := self._refusal(judged, stay):
            gone = len(judged) - sum(one.staleness.live and not one.staleness.over for one in judged)
            return RefusedGroup(
                group.group, reason, f"{gone} of {len(judged)} members are over the lag limit at train start"
            )
        advantages = self._algorithm.advantages([one.scored for one in stay])
        members = tuple(_member(one, values, self._content) for one, values in zip(stay, advantages, strict=True))
        if not any(sample.loss_tokens for member in members for sample in member.samples):
            raise FidelityError("actions: no token of the group was sampled by the policy")
        return OpenedGroup(leased=group, members=members)

    def _judge(
        self,
        group: LeasedGroup,
        member: LeasedMember,
        start: TrainStart,
        payloads: Mapping[str, bytes],
        rewards: Rewards,
    ) -> _Judged:
        payload = payloads[str(member.attempt_id)]
        if digest(payload) != member.payload_hash:
            raise FidelityError(f"payload: {member.attempt_id} is not what was put: its hash is another one")
        episode = episode_codec.decode(payload)
        check_episode(episode, from_wire=True)
        if episode.attempt_id != member.attempt_id or episode.oldest_version not in (None, member.oldest_version):
            raise FidelityError(f"identity: {episode.episode_id} was put as {member.attempt_id}")
        limit = self._queue.max_lag
        stale = staleness(episode, member.oldest_version, lambda v: start.lag(v, limit, group.lag), limit)
        rows = tuple(rewards.get(episode.episode_id, ()))
        return _Judged(member, ScoredEpisode(episode, member.score, rows), stale)

    def _staying(self, judged: Sequence[_Judged]) -> list[_Judged]:
        """The members that the advantages are over (P15)."""
        if self._queue.over_lag == "mask":
            return list(judged)
        return [one for one in judged if one.staleness.live and not one.staleness.over]

    def _refusal(self, judged: Sequence[_Judged], stay: Sequence[_Judged]) -> DropReason | None:
        """Why the lag of some members costs the whole group, or None (P15)."""
        if not any(one.staleness.live for one in stay):
            return DropReason.LAG
        if len(stay) == len(judged):
            return None
        if len(stay) < self._queue.min_group:
            return DropReason.LAG
        same = len({one.scored.score for one in stay}) == 1
        return DropReason.ZERO_VARIANCE if same and self._algorithm.needs_variance else None

    async def _rewards(self, groups: Sequence[LeasedGroup]) -> Rewards:
        """Reward rows by episode id, where the algorithm asks for them."""
        if self._read_rewards is None or not self._algorithm.needs.rewards:
            return {}
        return await self._read_rewards([str(member.attempt_id) for group in groups for member in group.members])

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


def _member(one: _Judged, advantages: Sequence[float], content: ContentSpan | None) -> OpenedMember:
    stale, episode = one.staleness, one.scored.episode
    return OpenedMember(
        leased=one.leased,
        scored=one.scored,
        lag=stale.lag,
        masked=(*inherited_spans(episode), *stale.over),
        live=stale.live,
        advantages=tuple(advantages),
        samples=tuple(build_samples(episode, advantages, stale.lag, stale.over, content)),
    )


def _describe(stats: LedgerStats) -> str:
    fates = ", ".join(f"{fate} {count}" for fate, count in sorted(stats.fates.items()) if count)
    return (
        f"the queue has {stats.groups_open} groups being played, {stats.groups_ready} ready, {stats.groups_leased}"
        f" leased; {stats.zero_variance_since_commit} without variance since the last commit; head"
        f" {stats.head}; of {stats.dispatched} attempts dispatched: {fates or 'none'}"
    )
