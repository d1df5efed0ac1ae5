"""What the run root says to a ledger that has lost writes (P8), as pure functions of what was read there.

The *chain* is every manifest that can be believed: its ancestors can be believed as well, it names its parent's hash,
and the ledger cannot have refused it, for its lag or because an ancestor had consumed the same group (P1, P7, P14).
What a crash or a fence left beside the chain is in no lineage of its head; it is an orphan that may be known, and
nothing that it consumed counts (P6).
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from headrace.platform.ledger import policy
from headrace.platform.ledger.policy import NO_VERSION, VersionNode
from headrace.platform.records.delivery import Chain, ChainGroup, ChainVersion, LedgerLimits
from headrace.platform.records.ids import AttemptId
from headrace.platform.records.status import Fate, FaultOwner
from headrace.platform.records.tables import FateRow
from headrace.platform.records.versions import VersionManifest

LOST = f"{Fate.FAILED}:{FaultOwner.INFRASTRUCTURE}"
"""The fate of an attempt that nobody can account for."""


def believed(manifests: Iterable[VersionManifest], limits: LedgerLimits) -> dict[int, VersionManifest]:
    """The chain, by number, in order."""
    chain: dict[int, VersionManifest] = {}
    nodes: dict[int, VersionNode] = {}
    consumers: defaultdict[int, list[int]] = defaultdict(list)
    for manifest in sorted(manifests, key=lambda manifest: manifest.ref.number):
        number, parent = manifest.ref.number, _parent(manifest)
        if parent != NO_VERSION and (parent not in chain or chain[parent].content_hash != manifest.parent_hash):
            continue
        if any(_over_lag(group, parent, nodes, limits) for group in manifest.groups):
            continue
        before = (consumer for group in manifest.groups for consumer in consumers[group.group])
        if any(policy.is_ancestor(nodes, consumer, parent) for consumer in before):
            continue
        chain[number] = manifest
        nodes[number] = VersionNode(parent, manifest.batches)
        for group in manifest.groups:
            consumers[group.group].append(number)
    return chain


def newest(chain: Mapping[int, VersionManifest]) -> int:
    """The version that goes on: the last one of the last learner, for each learner has a larger fence (P6)."""
    return max(chain, key=lambda number: (chain[number].fence, number), default=NO_VERSION)


def lineage(chain: Mapping[int, VersionManifest], version: int) -> list[int]:
    """`version` and its ancestors, oldest first; nothing for one that is not in the chain."""
    found = []
    while version in chain:
        found.append(version)
        version = _parent(chain[version])
    return found[::-1]


def chain_of(
    chain: Mapping[int, VersionManifest],
    *,
    epoch: int,
    highest: int,
    checkpoints: Collection[int],
    known_head: int | None,
    rows: Iterable[FateRow],
    group_size: int,
    sequence: int,
) -> Chain:
    """All that the ledger is told.

    Args:
        chain: as `believed` gives it.
        epoch: as claimed in the registry.
        highest: the highest version number that was ever used.
        checkpoints: versions with a complete checkpoint.
        known_head: the head of the ledger, which knows every version up to there; None for an empty one.
        rows: the fate table of the run root, in order.
        group_size: how many slots a group has.
        sequence: above every group that a checkpoint knows of.
    """
    head = newest(chain)
    line = lineage(chain, head)
    settled = max((number for number in line if number in checkpoints), default=NO_VERSION)
    # A rollback may have moved the ledger's head back: then this names some versions more than it must.
    unknown_after = settled if known_head is None else min(settled, known_head)
    ends = _ends(rows, chain, set(line))
    groups = {AttemptId.parse(text).group for text in ends}
    groups.update(group.group for manifest in chain.values() for group in manifest.groups)
    sequence = max(sequence, max(groups, default=-1) + 1)
    return Chain(
        epoch=epoch,
        head=head,
        settled=settled,
        next_number=max(highest, max(chain, default=NO_VERSION)) + 1,
        versions=tuple(_version(manifest) for manifest in chain.values()),
        consumed=tuple(group for number in line if number > unknown_after for group in chain[number].groups),
        sequence=sequence,
        fates=_totals(ends, sequence, group_size),
    )


def _parent(manifest: VersionManifest) -> int:
    return NO_VERSION if manifest.parent is None else manifest.parent


def _version(manifest: VersionManifest) -> ChainVersion:
    return ChainVersion(
        number=manifest.ref.number,
        parent=_parent(manifest),
        batches=manifest.batches,
        fence=manifest.fence,
        content_hash=manifest.content_hash,
    )


def _over_lag(group: ChainGroup, parent: int, nodes: Mapping[int, VersionNode], limits: LedgerLimits) -> bool:
    """Whether the ledger refused the commit that consumed this group, whichever of its batches the group was in."""
    trained = [member for member in group.members if member.fate == Fate.TRAINED]
    if limits.mask_over_lag:
        versions: Sequence[int] = [max((member.newest_version for member in trained), default=parent)]
    else:
        versions = [member.oldest_version for member in trained]
    return any(policy.path_lag(nodes, parent, 0, version, limits.max_lag) > limits.max_lag for version in versions)


def _ends(
    rows: Iterable[FateRow], chain: Mapping[int, VersionManifest], line: Collection[int]
) -> dict[str, str | None]:
    """The fate of every attempt that the run root knows of, None where it has not ended. The lineage's manifests are
    the truth for what they name; training by a version that is not on it was undone (P6)."""
    ends: dict[str, str | None] = {}
    for row in rows:
        undone = row.fate is Fate.IN_FLIGHT or (row.fate is Fate.TRAINED and row.version not in line)
        ends[row.episode_id] = None if undone else f"{row.fate}:{row.reason}".rstrip(":")
    for number in line:
        ends.update(chain[number].consumed)
    return ends


def _totals(ends: Mapping[str, str | None], sequence: int, group_size: int) -> dict[str, int]:
    """Attempts by fate. Whatever has no end, and every slot of which nothing is known at all, was lost (P3)."""
    totals = Counter(LOST if fate is None else fate for fate in ends.values())
    attempts = (AttemptId.parse(text) for text in ends)
    known = {(attempt.group, attempt.sample) for attempt in attempts}
    totals[LOST] += max(sequence * group_size - len(known), 0)
    return {fate: count for fate, count in totals.items() if count}
