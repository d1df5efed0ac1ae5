"""A stored run's learner as it stood before one of its steps: weights, optimizer, algorithm, and the steps from there.

Begins at a complete checkpoint (P5): the newest at or before the step, or the one that was asked for. Whatever is not
in the run root any more is named, with the setting that keeps more. Nothing of the run is changed.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from headrace.actors.rendering.content import content_span
from headrace.deploy.base_model import cache_folder
from headrace.deploy.context import RunContext
from headrace.deploy.replaying import run_config
from headrace.deploy.stored_version import open_version
from headrace.platform.config import RunConfig
from headrace.platform.contracts import Algorithm, LearnerBackend
from headrace.platform.errors import ConfigError, NotFound
from headrace.platform.ledger.memory import MemoryLedger
from headrace.platform.node_cache import node_cache
from headrace.platform.records.tables import RewardRow
from headrace.platform.records.versions import VersionManifest
from headrace.platform.registry.files import FileRegistry
from headrace.platform.registry.hashing import file_hashes
from headrace.platform.registry.pins import MemoryPins
from headrace.platform.store.episodes import EpisodeStore
from headrace.platform.store.run_root import RunRoot
from headrace.platform.store.tables import ReceiptTable, RewardTable
from headrace.trainer.algorithms import build_algorithm
from headrace.trainer.backends import build_backend
from headrace.trainer.checkpoint import CheckpointStore
from headrace.trainer.lora import first_files
from headrace.trainer.one_step import restore_step
from headrace.trainer.step_history import RecordedStep, StepHistory
from headrace.trainer.step_replay import StepReplay

REPLAYED_BACKEND = "torch"
TENSORS = ".safetensors"
"""How the names of files with weights end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredLearner:
    """Before learner step `step`. `steps` follow on `checkpoint`, the version whose weights `backend` has; the last one
    is that which published `step`."""

    step: int
    config: RunConfig
    checkpoint: int
    steps: Sequence[RecordedStep]
    backend: LearnerBackend
    algorithm: Algorithm
    replay: StepReplay = field(repr=False)


async def open_learner(root: RunRoot, step: int | None, version: int | None = None) -> StoredLearner:
    """The learner of a run at the newest complete checkpoint before `step`, or at that of `version`. Without a step it
    is the last one that was published.

    Raises:
        NotFound: there is no such step; no such checkpoint; or what the run began with is needed and gone.
        ConfigError: its learner's backend is not one that is replayed, or `version` is not before `step`.
    """
    import transformers

    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    config = run_config(root)
    if config.learner.backend != REPLAYED_BACKEND:
        raise ConfigError(
            f"the run was trained with learner.backend={config.learner.backend}; steps of"
            f" learner.backend={REPLAYED_BACKEND} are recomputed, of others not"
        )
    context = RunContext(run=root.name, root=root.url, config=config)
    manifests = await _registry(context).manifests()
    history = StepHistory(manifests, await asyncio.to_thread(ReceiptTable(root.url).rows), context.limits)
    step = history.last if step is None else step
    store = CheckpointStore(root.join("checkpoints"))
    checkpoint = _checkpoint(history, await asyncio.to_thread(store.complete), step, version)
    steps = history.steps(checkpoint, step)
    found = await asyncio.to_thread(store.latest_complete, {checkpoint})
    if found is None:
        raise NotFound(f"the checkpoint of version {checkpoint} is torn or altered; begin at another with --from")
    algorithm = build_algorithm(config.learner.algorithm)
    if algorithm.needs.reference or config.learner.lora.rank:
        backend, folder = await _backend_of_first(root, config, manifests[0])
    else:
        _, folder = await open_version(root, str(checkpoint))
        backend = build_backend(config.learner, folder)
    restore_step(backend, algorithm, found[1])
    return StoredLearner(
        step=step,
        config=config,
        checkpoint=checkpoint,
        steps=steps,
        backend=backend,
        algorithm=algorithm,
        replay=_replay(context, backend, algorithm, folder),
    )


def _replay(context: RunContext, backend: LearnerBackend, algorithm: Algorithm, folder: Path) -> StepReplay:
    """`folder` has the run's chat template."""
    store = EpisodeStore(context.root)
    rewards: dict[str, list[RewardRow]] = {}

    async def read_episodes(file: str, episode_ids: Sequence[str]) -> Sequence[bytes]:
        return await asyncio.to_thread(store.read, file, episode_ids)

    async def read_rewards(episode_ids: Sequence[str]) -> Mapping[str, Sequence[RewardRow]]:
        if not rewards:
            rewards.update(await asyncio.to_thread(RewardTable(context.root).by_episode))
        return {name: rewards[name] for name in episode_ids if name in rewards}

    return StepReplay(
        config=context.config.learner,
        queue=context.config.queue,
        limits=context.limits,
        backend=backend,
        algorithm=algorithm,
        read_episodes=read_episodes,
        read_rewards=read_rewards,
        content=content_span(context.config.learner.environment_loss.coefficient > 0, folder),
    )


def _registry(context: RunContext) -> FileRegistry:
    """Reads manifests; the ledger behind it knows nothing, and is not asked."""
    return FileRegistry(
        context.root,
        MemoryLedger(context.run, context.limits, lambda: 0.0),
        cache_dir=node_cache() / "versions",
        run=context.run,
        pins=MemoryPins(lambda: 0.0),
    )


def _checkpoint(history: StepHistory, complete: Sequence[int], step: int, version: int | None) -> int:
    """The version whose checkpoint to begin at."""
    if not 1 <= step <= history.last:
        raise NotFound(f"there is no learner step {step}; the run has published the steps 1 to {history.last}")
    reached = {number: at for number in complete if (at := history.step_of(number)) is not None}
    usable = [number for number, at in reached.items() if at < step]
    if version is None:
        if usable:
            return max(usable)
        if not reached:
            raise NotFound("the run has no complete checkpoint on its lineage: no step can be recomputed")
        first = min(reached.values()) + 1
        possible = f"steps {first} to {history.last} can be" if first <= history.last else "no step can be"
        raise NotFound(
            f"no checkpoint before learner step {step} is left, so it cannot be recomputed; {possible}."
            " A run with a larger learner.keep_checkpoints keeps more of them"
        )
    if version not in reached:
        there = ", ".join(map(str, sorted(usable))) or "none"
        raise NotFound(
            f"--from {version}: there is no complete checkpoint of that version; before step {step}: {there}"
        )
    if version not in usable:
        raise ConfigError(f"--from {version}: that version was made by step {reached[version]}, not before step {step}")
    return version


async def _backend_of_first(root: RunRoot, config: RunConfig, first: VersionManifest) -> tuple[LearnerBackend, Path]:
    """A backend over the weights that the run began with, which are the frozen reference, and the base of adapters; and
    the folder that has them."""
    named = Path(config.model.path) if config.model.path else None
    for folder in (await _first_version(root, first), named, cache_folder(config)):
        if folder is not None and await asyncio.to_thread((folder / "config.json").is_file):
            backend = build_backend(config.learner, folder)
            hashes = file_hashes(first_files(backend))
            if all(hashes.get(name) == of for name, of in first.files.items() if name.endswith(TENSORS)):
                return backend, folder
    raise NotFound(
        f"the weights that the run began with are gone, and its learner needs them (as the reference of"
        f" learner.algorithm.kl, or the base of learner.lora): version {first.ref.number} was removed, and neither"
        f" model.path nor the cache of supervised stages has them"
    )


async def _first_version(root: RunRoot, first: VersionManifest) -> Path | None:
    try:
        return (await open_version(root, str(first.ref.number)))[1]
    except NotFound:
        return None
