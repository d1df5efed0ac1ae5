"""`headrace replay-step`: a learner step recomputed from stored episodes, and its weights compared by hash.

Nothing but the record decides: the manifest chain names the groups and their order, payload hashes the episodes, the
checkpoint the state to start from, and the version's manifest the hash to come to. Where several steps made one
version, the comparison is at the version.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.deploy.stored_learner import TENSORS, StoredLearner, open_learner
from headrace.deploy.stored_version import open_version
from headrace.platform.errors import NotFound
from headrace.platform.observability.metrics import read_metrics
from headrace.platform.observability.names import Metric
from headrace.platform.records.versions import VersionManifest
from headrace.platform.registry.hashing import content_hash, file_hashes
from headrace.platform.store.run_root import RunRoot


@dataclass(frozen=True, kw_only=True, slots=True)
class TakenStep:
    """One recomputed step: its figures now, and the loss that the run wrote down then (None: its metrics lack it)."""

    step: int
    version: int
    groups: int
    loss: float
    loss_of_record: float | None
    grad_norm: float
    loss_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayedStep:
    """What came of it.

    `taken` are the steps from the checkpoint's version `begun_at` to the published one. `found` and `of_record` are
    hashes over the version's files, `files` those that differ. `differences` are the largest absolute differences of a
    weight by tensor, largest first; None where nothing differs, or where the version's own files were removed.
    """

    step: int
    version: int
    begun_at: int
    taken: tuple[TakenStep, ...]
    found: str
    of_record: str
    files: tuple[str, ...]
    differences: tuple[tuple[str, float], ...] | None

    @property
    def equal(self) -> bool:
        """Whether the weights are those that were published."""
        return self.found == self.of_record


async def replay_step(
    root: RunRoot, step: int | None, begin: int | None = None, news: Callable[[TakenStep], None] = lambda _: None
) -> ReplayedStep:
    """Recompute learner step `step` of a run.

    Args:
        root: the run; nothing of it is changed.
        step: from 1; None for the last one that was published.
        begin: the version whose checkpoint to begin at; None for the newest before the step.
        news: is told of each step taken.

    Raises:
        NotFound: there is no such step, checkpoint or episode, or an episode is not what was trained on.
        ConfigError: the run's backend is not one that is replayed, or `begin` is not before the step.
    """
    learner = await open_learner(root, step, begin)
    losses = _losses(root)
    taken: list[TakenStep] = []
    for recorded in learner.steps:
        figures = await learner.replay.take(recorded)
        taken.append(
            TakenStep(
                step=recorded.step,
                version=recorded.version.ref.number,
                groups=len(recorded.groups),
                loss=figures["loss"],
                loss_of_record=losses.get(recorded.step),
                grad_norm=figures.get("grad_norm", 0.0),
                loss_tokens=int(figures["loss_tokens"]),
            )
        )
        news(taken[-1])
    return await _compared(root, learner, tuple(taken))


async def _compared(root: RunRoot, learner: StoredLearner, taken: tuple[TakenStep, ...]) -> ReplayedStep:
    version = learner.steps[-1].version
    files = dict(learner.backend.weights())
    hashes = file_hashes(files)
    other = tuple(sorted(name for name in hashes.keys() | version.files if hashes.get(name) != version.files.get(name)))
    return ReplayedStep(
        step=learner.step,
        version=version.ref.number,
        begun_at=learner.checkpoint,
        taken=taken,
        found=content_hash(hashes),
        of_record=version.content_hash,
        files=other,
        differences=await _differences(root, version, files) if other else None,
    )


def _losses(root: RunRoot) -> dict[int, float]:
    """The loss of each step as the run wrote it down; after a rollback the later one."""
    try:
        return {
            record[Metric.LEARNER_STEP]: record[Metric.LOSS]
            for record in read_metrics(root.metrics)
            if record.get(Metric.LOSS) is not None
        }
    except FileNotFoundError:
        return {}


async def _differences(
    root: RunRoot, version: VersionManifest, files: Mapping[str, bytes]
) -> tuple[tuple[str, float], ...] | None:
    """The largest absolute difference of each tensor that differs, largest first."""
    try:
        _, folder = await open_version(root, str(version.ref.number), as_stored=True)
    except NotFound:
        return None
    found = await asyncio.to_thread(_furthest_by_tensor, folder, version.files, files)
    return tuple(sorted(((name, far) for name, far in found.items() if far), key=lambda one: (-one[1], one[0])))


def _furthest_by_tensor(folder: Path, names: Iterable[str], files: Mapping[str, bytes]) -> dict[str, float]:
    from safetensors.torch import load

    found: dict[str, float] = {}
    for name in names:
        if name.endswith(TENSORS):
            theirs, ours = load((folder / name).read_bytes()), load(files[name]) if name in files else {}
            found |= {tensor: _furthest(ours.get(tensor), theirs.get(tensor)) for tensor in theirs.keys() | ours.keys()}
    return found


def _furthest(ours: Any, theirs: Any) -> float:
    """The largest absolute difference of two tensors; infinite where one is missing, or of another shape."""
    if ours is None or theirs is None or ours.shape != theirs.shape:
        return float("inf")
    return float((ours.double() - theirs.double()).abs().max()) if ours.numel() else 0.0
