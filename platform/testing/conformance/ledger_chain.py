"""What a manifest says of the groups that a version consumed, and a chain of such versions, for the ledger suite."""

from collections.abc import Sequence

from headrace.platform.records.delivery import Chain, ChainGroup, ChainMember, ChainVersion, LeasedGroup, LeasedMember


def chain_group(group: LeasedGroup, consumed_by: int, fate: str = "trained") -> ChainGroup:
    """A leased group as the manifest of the version that consumed it states it."""

    def stated(member: LeasedMember) -> ChainMember:
        return ChainMember(
            sample=member.attempt_id.sample,
            attempt=member.attempt_id.attempt,
            fate=fate,
            payload_hash=member.payload_hash,
            store_file=member.store_file,
            score=member.score,
            oldest_version=member.oldest_version,
            newest_version=member.newest_version,
            lag=group.lag,
        )

    return ChainGroup(
        group=group.group,
        position=group.position,
        size=group.size,
        version=group.version,
        consumed_by=consumed_by,
        members=tuple(stated(member) for member in group.members),
    )


def straight_chain(
    fences: Sequence[int],
    *,
    epoch: int = 1,
    settled: int = -1,
    consumed: Sequence[ChainGroup] = (),
    sequence: int = 0,
    fates: dict[str, int] | None = None,
) -> Chain:
    """Versions 0, 1, … of one lineage, one batch each, committed under `fences`; their contents are the harness's."""
    versions = tuple(
        ChainVersion(number=number, parent=number - 1, batches=number, fence=fence, content_hash=f"content-{number}")
        for number, fence in enumerate(fences)
    )
    return Chain(
        epoch=epoch,
        head=len(versions) - 1,
        settled=settled,
        next_number=len(versions),
        versions=versions,
        consumed=tuple(consumed),
        sequence=sequence,
        fates=fates or {},
    )
