"""The one file that names concrete classes together. Runtimes say where the parts run; this says what they are made of.

Builders import heavy libraries inside, so that each process loads only what it plays with: rollout workers run
without torch.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.actors.branching import branching_of
from headrace.actors.delivery import Delivery
from headrace.actors.environments.registry import environment_kind
from headrace.actors.harness.environment import HARNESS
from headrace.actors.harness.play import Doorway
from headrace.actors.news import News
from headrace.actors.outbox import Outbox
from headrace.actors.plan import AsyncScorer
from headrace.actors.quarantine import QuarantineFile
from headrace.actors.rendering import load_renderer
from headrace.actors.rendering.content import content_span
from headrace.actors.scoring.pool import build_scorer_process
from headrace.actors.tasks.history import results_from_store
from headrace.actors.tuning import tune_collector
from headrace.actors.worker import RolloutWorker, WorkerSettings
from headrace.actors.world_resources import WorldResources
from headrace.actors.worlds import Worlds
from headrace.deploy.auditing import AuditCopying, gateway_place
from headrace.deploy.connections import (
    CONNECT_DEADLINE_S,
    Closing,
    connect_ledger,
    connect_registry,
    open_part,
    open_process_log,
    patient,
)
from headrace.deploy.context import POLICY_ID, RunContext
from headrace.deploy.engines import build_served_engine
from headrace.deploy.shared_model import SharedModel, model_here
from headrace.deploy.source_digest import code_digest
from headrace.deploy.weight_offer import offer_weights
from headrace.platform.config import EnvironmentConfig, RunConfig
from headrace.platform.contracts import LearnerBackend, Ledger, TokenGenerator, VersionRegistry
from headrace.platform.hashing import digest_value
from headrace.platform.observability.parts import Part
from headrace.platform.records.episode import Digests
from headrace.platform.records.tables import RewardRow
from headrace.platform.store.episodes import EpisodeStore
from headrace.platform.store.reward_feed import RewardFeed
from headrace.platform.store.run_root import RunRoot
from headrace.platform.store.tables import FateTable, ReceiptTable, RewardTable

if TYPE_CHECKING:
    from headrace.deploy.serving_door import WorkerDoors
    from headrace.serving.door.client import DoorClient
    from headrace.serving.pool import Pool
    from headrace.serving.service import ReplicaService
    from headrace.trainer.learner import Learner
    from headrace.trainer.publisher import Offer

_log = logging.getLogger(__name__)
_SLOW_RESET_S = 10.0
_VLLM_START_S = 600.0  # its first load starts it, which has a deadline of its own


# --- shared parts -----------------------------------------------------------------------------------------------------


async def reconcile_run(context: RunContext, ledger: Ledger, registry: VersionRegistry) -> bool:
    """Make the ledger agree with the run root after a restart of its server (P8), and with the environments that this
    build has (P17); whether it had lost anything."""
    from headrace.platform.ledger.reconcile import reconcile
    from headrace.trainer.checkpoint import CheckpointStore

    checkpoints = CheckpointStore(f"{context.root}/checkpoints")
    newest = await asyncio.to_thread(checkpoints.newest_state)
    changed = await reconcile(
        ledger,
        registry,
        limits=context.limits,
        checkpoints=checkpoints.complete,
        fate_rows=FateTable(context.root).rows,
        group_size=context.config.learner.algorithm.group_size,
        sequence=newest.dispatch_sequence if newest is not None else 0,
    )
    for environment, versions in (await asyncio.to_thread(environment_versions, context.config)).items():
        await ledger.allow(environment, sorted(versions))
    return changed


def environment_versions(config: RunConfig) -> dict[str, set[str]]:
    """The versions of the recipe's environments that this build plays, by their names."""
    return Worlds(config.environments, "train", config.seed, config.curriculum).versions


def known_news(context: RunContext) -> News:
    """What a run's workers have found out so far, for one that is new: scores of stored episodes, and tasks that are
    out. Reads files."""
    config = context.config
    scores = results_from_store(config.curriculum, context.root) if config.curriculum.kind == "success_window" else ()
    return News(
        scores=tuple(scores), quarantined=tuple(QuarantineFile(context.root).read(environment_versions(config)))
    )


# --- serving ----------------------------------------------------------------------------------------------------------


async def build_replica(context: RunContext, index: int) -> "ReplicaService":
    """Replica number `index`, with its own connections."""
    from headrace.serving.door.server import DoorServer
    from headrace.serving.service import ReplicaService

    name = f"replica-{index}"
    tune_collector()
    open_process_log(context, name)
    part = open_part(context, name)
    ledger = await connect_ledger(context)
    registry, close_registry = await connect_registry(context, ledger)
    engine = build_served_engine(context, name)

    async def closing() -> None:
        await close_registry()
        await ledger.close()
        part.close()

    serving = context.config.serving
    door = DoorServer(engine, context.door_token, name, host=_door_host(context), grace_s=serving.reconnect_s)
    starts_at_load = serving.engine == "vllm"
    return ReplicaService(
        engine,
        name,
        door,
        registry,
        context.keep_versions,
        closing,
        part=part,
        update_mode=context.config.rollout.update_mode,
        control_deadline_s=serving.control_deadline_s + (_VLLM_START_S if starts_at_load else 0.0),
        drain_grace_s=max(serving.drain_grace_s, _SLOW_RESET_S if _has_slow_resets(context.config) else 0.0),
    )


def _has_slow_resets(config: RunConfig) -> bool:
    """Whether some time goes by between the admission of a group and the first request of its members."""
    return any(each.sandbox is not None or each.pool is not None or each.tools for each in config.environments)


def _door_host(context: RunContext) -> str:
    """Loopback, or in a joined cluster the address under which the other nodes know this one."""
    if not context.config.runtime.ray_address:
        return "127.0.0.1"
    import ray

    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


async def connect_replica(context: RunContext, host: str, port: int) -> "DoorClient":
    """A connection to the replica behind that door."""
    from headrace.serving.door.client import DoorClient

    reconnect_s = context.config.serving.reconnect_s
    return await DoorClient.connect(
        host, port, context.door_token, deadline_s=CONNECT_DEADLINE_S, reconnect_s=reconnect_s
    )


async def connect_pool(context: RunContext, addresses: Sequence[tuple[str, int]]) -> "Pool":
    """A pool over the replicas at `addresses`."""
    from headrace.serving.pool import Pool

    pool = Pool()
    for host, port in addresses:
        pool.add(await connect_replica(context, host, port))
    return pool


# --- rollouts ---------------------------------------------------------------------------------------------------------


def assemble_worker(
    context: RunContext,
    index: int,
    model_dir: Path,
    generator: TokenGenerator,
    newest_version: Callable[[], int | None],
    ledger: Ledger,
    part: Part | None = None,
    replace_replica: Callable[[str, str, int], Awaitable[None]] | None = None,
    retries: Callable[[], tuple[int, int]] | None = None,
    doorways: Mapping[str, Doorway] | None = None,
) -> RolloutWorker:
    """A rollout worker over whatever engine and ledger it is given."""
    config, worker_id, renderer = context.config, f"rollout-{index}", load_renderer(model_dir)
    resources = WorldResources(gateway=gateway_place(RunRoot(context.root), config.gateway))
    settings = WorkerSettings(
        run=context.run,
        worker_id=worker_id,
        policy_id=POLICY_ID,
        group_size=config.learner.algorithm.group_size,
        max_episodes=config.rollout.max_episodes,
        request_deadline_s=config.serving.request_deadline_s,
        dispatch_lease_s=config.queue.dispatch_lease_s,
        update_mode=config.rollout.update_mode,
        branching=branching_of(config.learner.algorithm),
        digests=Digests(
            tokenizer=renderer.digest,
            template=renderer.digest,
            code=digest_value([code_digest(), *(environment_kind(each.name).digest for each in config.environments)]),
            config=digest_value(config.model_dump(mode="json")),
        ),
    )
    worlds = Worlds(config.environments, "train", config.seed, config.curriculum, resources)
    worlds.open_resources()
    return RolloutWorker(
        settings,
        worlds,
        renderer,
        generator,
        newest_version,
        Delivery(
            ledger=ledger,
            store=EpisodeStore(context.root),
            rewards=RewardTable(context.root, worker_id),
            worker_id=worker_id,
            outbox=Outbox(context.local("outbox") / worker_id, context.run),
        ),
        lambda split: Worlds(config.environments, split, config.seed, config.curriculum, resources),
        build_scorers(config.environments),
        part=part,
        replace_replica=replace_replica,
        retries=retries,
        doorways=doorways,
    )


def copy_audit(context: RunContext) -> AuditCopying:
    """Keeps the run root's copy of this node's audit up to date, from now on until it is closed."""
    root = RunRoot(context.root)
    copying = AuditCopying(root, gateway_place(root, context.config.gateway))
    copying.start()
    return copying


def build_scorers(environments: Iterable[EnvironmentConfig]) -> dict[str, AsyncScorer]:
    """Scorers by environment: the recipe's, else what the environment brings. Each starts its process when needed.

    Raises:
        ConfigError: a recipe's scorer is not there.
    """
    chosen = {each.known_as: each.scorer or environment_kind(each.name).scorer for each in environments}
    return {name: build_scorer_process(config) for name, config in chosen.items() if config is not None}


async def open_doors(
    context: RunContext, index: int, model_dir: Path, generator: TokenGenerator, part: Part | None = None
) -> "WorkerDoors | None":
    """The doors through which harnesses play worker number `index`'s episodes; None where no harness plays."""
    if all(environment.name != HARNESS for environment in context.config.environments):
        return None
    from headrace.deploy.serving_door import open_worker_doors

    return await open_worker_doors(context.config, index, model_dir, generator, part)


async def build_worker(
    context: RunContext, index: int, model: Path | SharedModel, addresses: Sequence[tuple[str, int]]
) -> tuple[RolloutWorker, Closing]:
    """Rollout worker number `index`, with its own connections."""
    tune_collector()
    open_process_log(context, f"rollout-{index}")
    model_dir = await asyncio.to_thread(model_here, context, model)
    part = open_part(context, f"rollout-{index}")
    ledger = await connect_ledger(context)
    pool = await connect_pool(context, addresses)
    await pool.wait_version(0, context.config.serving.start_deadline_s)
    doors = await open_doors(context, index, model_dir, pool, part)
    copying = copy_audit(context)

    async def closing() -> None:
        if doors is not None:
            await doors.close()
        await pool.close()
        await ledger.close()
        await copying.close()
        part.close()

    async def replace_replica(old_name: str, host: str, port: int) -> None:
        old = pool.replace(old_name, await connect_replica(context, host, port))
        if old is not None:
            await old.close()

    def retries() -> tuple[int, int]:
        stats = pool.stats()
        return stats.retried, stats.resampled

    waiting = patient(context, ledger, part)
    worker = assemble_worker(
        context,
        index,
        model_dir,
        pool,
        pool.newest_version,
        waiting,
        part,
        replace_replica,
        retries,
        doors.doorways if doors is not None else None,
    )
    return worker, closing


# --- learning ---------------------------------------------------------------------------------------------------------


def assemble_learner(
    context: RunContext,
    model_dir: Path,
    ledger: Ledger,
    registry: VersionRegistry,
    *,
    offer: "Offer | None" = None,
    part: Part | None = None,
    inline: bool = False,
    backend: LearnerBackend | None = None,
) -> "Learner":
    """A learner over whatever ledger, registry and backend it is given."""
    import torch

    from headrace.trainer.algorithms import build_algorithm
    from headrace.trainer.backends import build_backend
    from headrace.trainer.bad_step import BadSteps
    from headrace.trainer.checkpoint import CheckpointStore
    from headrace.trainer.learner import Learner

    config = context.config
    torch.set_num_threads(config.learner.threads)
    store, feed = EpisodeStore(context.root), RewardFeed(context.root)

    async def read_episodes(file: str, episode_ids: Sequence[str]) -> Sequence[bytes]:
        return await asyncio.to_thread(store.read, file, episode_ids)

    async def read_rewards(episode_ids: Sequence[str]) -> Mapping[str, Sequence[RewardRow]]:
        return await asyncio.to_thread(feed.take, episode_ids)

    patience_s = max(config.learner.batch_deadline_s, config.serving.longest_start_s)
    return Learner(
        run=context.run,
        config=config.learner.model_copy(update={"batch_deadline_s": patience_s}),
        queue=config.queue,
        backend=backend or build_backend(config.learner, model_dir),
        algorithm=build_algorithm(config.learner.algorithm),
        ledger=ledger,
        registry=registry,
        read_episodes=read_episodes,
        read_rewards=read_rewards,
        content=content_span(config.learner.environment_loss.coefficient > 0, model_dir),
        checkpoints=CheckpointStore(f"{context.root}/checkpoints"),
        policy_id=POLICY_ID,
        clock=time.time,
        on_receipts=ReceiptTable(context.root, "learner").append,
        on_bad_step=BadSteps(context.root).keep,
        world_size=config.learner.ranks,
        offer=offer,
        part=part,
        inline=inline,
    )


async def build_learner(
    context: RunContext, model: Path | SharedModel, backend: LearnerBackend | None = None
) -> tuple["Learner", Closing]:
    """The learner, with its own connections, over `backend` or one of its own."""
    open_process_log(context, "learner")
    model_dir = await asyncio.to_thread(model_here, context, model)
    part = open_part(context, "learner")
    ledger = await connect_ledger(context)
    registry, close_registry = await connect_registry(context, ledger)
    offer, close_offer = None, None
    if context.config.serving.transport == "nccl":
        offer, close_offer = await offer_weights(context, _door_host(context))
    learner: Learner | None = None

    def held() -> Sequence[int]:
        return learner.held if learner is not None else ()

    async def closing() -> None:
        if close_offer is not None:
            await close_offer()
        await close_registry()
        await ledger.close()
        part.close()

    waiting = patient(context, ledger, part, held)
    learner = assemble_learner(context, model_dir, waiting, registry, offer=offer, part=part, backend=backend)
    return learner, closing
