"""What a commit says of the groups that it consumes: fates, chain groups, payload files, and the training receipts.

A group is consumed whole (P7): the members that were trained, and those that the learner left out because they were
over the lag limit at train start (P15), which are drops. Whoever left at the lease already is not among them. Every
number here comes from the batch as it was opened; nothing is looked up.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headrace.platform.records.delivery import ChainGroup, ChainMember, LeasedMember
from headrace.platform.records.status import DropReason, Fate
from headrace.platform.records.tables import Receipt
from headrace.trainer.intake import OpenedGroup
from headrace.trainer.step_statistics import EpisodeStatistics

TRAINED = Fate.TRAINED.value
LEFT_FOR_LAG = f"{Fate.DROPPED}:{DropReason.LAG}"


@dataclass(frozen=True, slots=True)
class TrainedGroup:
    """A group that learner step `step`, from 1, was taken on, and the backend's figures by episode id."""

    group: OpenedGroup
    statistics: Mapping[str, EpisodeStatistics]
    step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Consumption:
    """What version `number` consumed: fate by attempt, groups for the manifest (P8), and files with payloads (P9)."""

    fates: dict[str, str]
    groups: tuple[ChainGroup, ...]
    episode_files: tuple[str, ...]


NOTHING = Consumption(fates={}, groups=(), episode_files=())
"""What the first version consumed."""


def consumption(trained: Sequence[TrainedGroup], number: int) -> Consumption:
    """State what version `number` is about to consume."""
    groups = tuple(_chain_group(one.group, number) for one in trained)
    leased = [member for one in trained for member in one.group.leased.members]
    fates = {str(member.attempt_id): fate for one in trained for member, fate, _ in _ends(one.group)}
    files = sorted({member.store_file for member in leased if member.store_file})
    return Consumption(fates=fates, groups=groups, episode_files=tuple(files))


def receipts(trained: Sequence[TrainedGroup], number: int) -> list[Receipt]:
    """How each trained episode was trained on, on the way to version `number`."""
    rows = []
    for one in trained:
        for member in one.group.members:
            if not member.live:
                continue
            own = one.statistics.get(member.episode.episode_id, EpisodeStatistics(0, 1.0, 0.0))
            rows.append(
                Receipt(
                    episode_id=member.episode.episode_id,
                    version=number,
                    advantages=member.advantages,
                    masked=member.masked,
                    loss_tokens=own.loss_tokens,
                    ratio_mean=own.ratio_mean,
                    clip_share=own.clip_share,
                    lag=member.lag,
                    step=one.step,
                )
            )
    return rows


def _ends(group: OpenedGroup) -> list[tuple[LeasedMember, str, int]]:
    """Every leased member with its fate and the lag that it was trained with, in the order of the samples."""
    lags = {member.leased.attempt_id: member.lag for member in group.members if member.live}
    return [
        (member, TRAINED, lags[member.attempt_id]) if member.attempt_id in lags else (member, LEFT_FOR_LAG, 0)
        for member in group.leased.members
    ]


def _chain_group(group: OpenedGroup, number: int) -> ChainGroup:
    leased = group.leased
    return ChainGroup(
        group=leased.group,
        position=leased.position,
        size=leased.size,
        version=leased.version,
        consumed_by=number,
        members=tuple(
            ChainMember(
                sample=member.attempt_id.sample,
                attempt=member.attempt_id.attempt,
                fate=fate,
                payload_hash=member.payload_hash,
                store_file=member.store_file,
                score=member.score,
                oldest_version=member.oldest_version,
                newest_version=member.newest_version,
                lag=lag,
            )
            for member, fate, lag in _ends(group)
        ),
    )
