"""Manifests as they lie in a run root, made by hand."""

from headrace.platform.records.delivery import ChainGroup, ChainMember
from headrace.platform.records.ids import AttemptId
from headrace.platform.records.status import Fate
from headrace.platform.records.tables import FateRow
from headrace.platform.records.versions import VersionManifest, VersionRef


def member(sample: int, version: int, fate: str = "trained", *, attempt: int = 0, newest: int = -1) -> ChainMember:
    return ChainMember(
        sample=sample,
        attempt=attempt,
        fate=fate,
        payload_hash=f"hash {sample}.{attempt}",
        store_file="episodes/0.parquet",
        score=float(sample),
        oldest_version=version,
        newest_version=max(newest, version),
    )


def group(number: int, by: int, version: int, *members: ChainMember) -> ChainGroup:
    return ChainGroup(
        group=number,
        position=number,
        size=2,
        version=version,
        consumed_by=by,
        members=members or (member(0, version), member(1, version)),
    )


def manifest(
    number: int, parent: int | None, *groups: ChainGroup, fence: int = 1, batches: int | None = None, hash_of: str = ""
) -> VersionManifest:
    """Version `number`; B is its number unless given, and `hash_of` replaces the hash of its parent."""
    return VersionManifest(
        ref=VersionRef("policy", number, fence),
        parent=parent,
        parent_hash="" if parent is None else hash_of or f"content-{parent}",
        fence=fence,
        kind="full",
        content_hash=f"content-{number}",
        batches=number if batches is None else batches,
        path=f"versions/f{fence:04d}-v{number:06d}",
        consumed={
            str(AttemptId("r", one.group, each.sample, each.attempt)): each.fate
            for one in groups
            for each in one.members
        },
        groups=groups,
    )


def row(group: int, sample: int, fate: str, version: int | None = None, attempt: int = 0) -> FateRow:
    kind, _, reason = fate.partition(":")
    episode_id = str(AttemptId("r", group, sample, attempt))
    return FateRow(episode_id=episode_id, fate=Fate(kind), reason=reason, version=version)
