"""Which groups each learner step was taken on, in what order and from where, as the run root states it.

The manifest chain says what each version consumed, in the order of training (P8); the learner step of a version is B
of P14 along its lineage. Where a version came of several steps, the training receipts say which group was in which.
What learners left beside the lineage is no step of the run (P6). Pure: reads nothing.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from headrace.platform.errors import NotFound
from headrace.platform.ledger.chain import believed, lineage, newest
from headrace.platform.ledger.policy import NO_VERSION, VersionNode
from headrace.platform.records.delivery import ChainGroup, LeasedGroup, LeasedMember, LedgerLimits
from headrace.platform.records.ids import AttemptId
from headrace.platform.records.status import Fate
from headrace.platform.records.tables import Receipt
from headrace.platform.records.versions import VersionManifest
from headrace.trainer.staleness import TrainStart


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedStep:
    """A learner step, counted from 1: the weights that it started from (P14), its groups as they were leased, without
    payloads, how many members of each were left out for their lag (P15), and the version that came of it and of other
    steps; `publishes` says that it was the last of them."""

    step: int
    start: TrainStart
    groups: tuple[LeasedGroup, ...]
    left_out: Mapping[int, int]
    version: VersionManifest
    publishes: bool


class StepHistory:
    """The steps of a run's lineage.

    Args:
        manifests: all that can be read.
        receipts: all of the run's; needed for versions of more than one step.
        limits: the run's; a manifest that they refuse is beside the lineage.
    """

    def __init__(self, manifests: Iterable[VersionManifest], receipts: Iterable[Receipt], limits: LedgerLimits) -> None:
        self._all = sorted(manifests, key=lambda manifest: manifest.ref.number)
        chain = believed(self._all, limits)
        self._line = {number: chain[number] for number in lineage(chain, newest(chain))}
        self._steps_of = {(row.episode_id, row.version): row.step for row in receipts}

    @property
    def last(self) -> int:
        """The last step that was published; 0 for none."""
        return max((manifest.batches for manifest in self._line.values()), default=0)

    def step_of(self, version: int) -> int | None:
        """The step that made `version`, 0 for the first; None for one that is not on the lineage."""
        return self._line[version].batches if version in self._line else None

    def steps(self, after: int, step: int) -> list[RecordedStep]:
        """The steps that follow on those of version `after`, up to the one that published `step`.

        Raises:
            NotFound: the run has published no such step; or a version on the way came of several steps and its
                receipts do not say which group was in which.
        """
        if not 1 <= step <= self.last:
            raise NotFound(f"there is no learner step {step}; the run has published the steps 1 to {self.last}")
        found: list[RecordedStep] = []
        for number, manifest in self._line.items():
            if number > after and manifest.batches > self._line[after].batches:
                found += self._of(manifest)
                if manifest.batches >= step:
                    break
        return found

    def _of(self, manifest: VersionManifest) -> list[RecordedStep]:
        parent = NO_VERSION if manifest.parent is None else manifest.parent
        before = self._line[parent].batches
        known = {
            one.ref.number: VersionNode(NO_VERSION if one.parent is None else one.parent, one.batches)
            for one in self._all
            if one.ref.number < manifest.ref.number
        }
        by_step = self._split(manifest, before)
        return [
            RecordedStep(
                step=step,
                start=TrainStart(lineage=known, parent=parent, ahead=step - 1 - before),
                groups=tuple(_leased(group, manifest) for group in by_step[step]),
                left_out={one.group: sum(m.fate != Fate.TRAINED for m in one.members) for one in by_step[step]},
                version=manifest,
                publishes=step == manifest.batches,
            )
            for step in range(before + 1, manifest.batches + 1)
        ]

    def _split(self, manifest: VersionManifest, before: int) -> Mapping[int, Sequence[ChainGroup]]:
        """The version's groups by step, in the order of training."""
        if manifest.batches == before + 1:
            return {manifest.batches: manifest.groups}
        found: dict[int, list[ChainGroup]] = {step: [] for step in range(before + 1, manifest.batches + 1)}
        for group in manifest.groups:
            step = self._step(group, manifest)
            if step not in found:
                raise NotFound(
                    f"version {manifest.ref.number} came of the steps {before + 1} to {manifest.batches}, and no"
                    f" receipt says in which of them group {group.group} was"
                )
            found[step].append(group)
        return found

    def _step(self, group: ChainGroup, manifest: VersionManifest) -> int:
        """The step that a group was in, 0 where no receipt says it. Every trained group has a trained member."""
        run = run_of(manifest)
        for member in group.members:
            if member.fate == Fate.TRAINED:
                name = str(AttemptId(run, group.group, member.sample, member.attempt))
                if step := self._steps_of.get((name, manifest.ref.number), 0):
                    return step
        return 0


def run_of(manifest: VersionManifest) -> str:
    """The run whose attempts a version consumed; empty for one that consumed none."""
    return next((AttemptId.parse(text).run for text in manifest.consumed), "")


def _leased(group: ChainGroup, manifest: VersionManifest) -> LeasedGroup:
    """The group as the learner had leased it. Its lag stands for versions that the learner had never heard of."""
    run = run_of(manifest)
    return LeasedGroup(
        group=group.group,
        position=group.position,
        size=group.size,
        version=group.version,
        lag=max((member.lag for member in group.members), default=0),
        deliveries=1,
        dispatched_s=0.0,
        members=tuple(
            LeasedMember(
                attempt_id=AttemptId(run, group.group, member.sample, member.attempt),
                payload=b"",
                payload_hash=member.payload_hash,
                store_file=member.store_file,
                score=member.score,
                oldest_version=member.oldest_version,
                newest_version=member.newest_version,
            )
            for member in group.members
        ),
    )
