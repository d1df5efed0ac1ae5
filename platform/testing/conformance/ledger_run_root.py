"""What a run root would keep of a random play: manifests, checkpoints and fate rows, and the chain that they make."""

from collections.abc import Sequence

from headrace.platform.ledger.chain import believed, chain_of, lineage, newest
from headrace.platform.ledger.policy import NO_VERSION, VersionNode
from headrace.platform.records.delivery import Chain, CommitRequest, LeasedGroup, LedgerLimits
from headrace.platform.records.tables import FateRow
from headrace.platform.records.versions import VersionManifest, VersionRef
from headrace.platform.testing.conformance.ledger_chain import chain_group


class RunRoot:
    """Everything in it survives whatever happens to the ledger."""

    def __init__(self, run: str, limits: LedgerLimits) -> None:
        self.run = run
        self.limits = limits
        self.manifests: dict[int, VersionManifest] = {}
        self.checkpoints: set[int] = set()
        self.rows: list[FateRow] = []
        self.highest = NO_VERSION

    def write_manifest(self, request: CommitRequest, groups: Sequence[LeasedGroup]) -> None:
        """State what a commit is about to do (P8). Numbers are taken once."""
        assert request.number not in self.manifests, f"version {request.number} has a manifest already (P6)"
        parent = self.manifests.get(request.parent)
        fate = next(iter(request.fates.values()), "trained")
        self.manifests[request.number] = VersionManifest(
            ref=VersionRef("policy", request.number, request.fence),
            parent=request.parent if parent else None,
            parent_hash=parent.content_hash if parent else "",
            fence=request.fence,
            kind="full",
            content_hash=request.content_hash,
            batches=(parent.batches if parent else 0) + request.batches,
            path="",
            consumed=request.fates,
            groups=tuple(chain_group(group, request.number, fate) for group in groups),
        )

    def newest(self) -> tuple[int, str]:
        """The version that goes on, and its content."""
        head = newest(self._believed())
        return head, self.manifests[head].content_hash if head != NO_VERSION else ""

    def chain(self, epoch: int, known_head: int | None) -> Chain:
        """What a ledger that knows versions up to `known_head` is told."""
        return chain_of(
            self._believed(),
            epoch=epoch,
            highest=self.highest,
            checkpoints=self.checkpoints,
            known_head=known_head,
            rows=self.rows,
            group_size=2,
            sequence=0,
        )

    def lineage(self) -> dict[int, VersionNode]:
        """Every version that can be believed."""
        return {
            number: VersionNode(NO_VERSION if manifest.parent is None else manifest.parent, manifest.batches)
            for number, manifest in self._believed().items()
        }

    def consumed_on_lineage(self) -> dict[str, int]:
        """The version that consumed each slot, along the lineage of the newest one. No slot is in two of them (P1)."""
        chain = self._believed()
        found: dict[str, int] = {}
        for number in lineage(chain, newest(chain)):
            for group in chain[number].groups:
                for member in group.members:
                    slot = f"{group.group}.{member.sample}"
                    assert slot not in found, f"slot {slot} was consumed by {found[slot]} and by {number} (P1)"
                    found[slot] = number
        return found

    def _believed(self) -> dict[int, VersionManifest]:
        return believed(self.manifests.values(), self.limits)
