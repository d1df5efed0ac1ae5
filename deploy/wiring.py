"""The one file that names concrete classes together. Runtimes say where the parts run; this says what they are made of.

Builders import heavy libraries inside, so that each process loads only what it plays with: rollout workers run
without torch.
"""

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.actors.delivery import Delivery
from headrace.actors.environments.registry import environment_kind
from headrace.actors.plan import AsyncScorer
from headrace.actors.rendering import load_renderer
from headrace.actors.scoring.pool import build_scorer_process
from headrace.actors.tuning import tune_collector
from headrace.actors.worker import RolloutWorker, WorkerSettings
from headrace.actors.worlds import Worlds
from headrace.deploy.context import POLICY_ID, RunContext
from headrace.deploy.source_digest import code_digest
from headrace.platform.config import RunConfig
from headrace.platform.config.secret_references import SecretValues, resolve
from headrace.platform.contracts import Ledger, TokenGenerator, VersionRegistry
from headrace.platform.hashing import digest_value
from headrace.platform.observability.logs import open_log
from headrace.platform.records.episode import Digests
from headrace.platform.store.episodes import EpisodeStore
from headrace.platform.store.tables import ReceiptTable, RewardTable

if TYPE_CHECKING:
    from headrace.platform.ledger.redis_ledger import RedisLedger
    from headrace.serving.pool import Pool
    from headrace.serving.service import ReplicaService
    from headrace.serving.torch_engine import TorchEngine
    from headrace.trainer.learner import Learner

Closing = Callable[[], Awaitable[None]]
_CONNECT_DEADLINE_S = 30.0


# --- shared parts -----------------------------------------------------------------------------------------------------


def open_process_log(context: RunContext, name: str) -> logging.Handler:
    """Log to `logs/NAME.log`, with every secret that this process resolves taken out."""
    secrets = SecretValues()
    resolve(context.config.queue.redis_url, secrets)
    if context.door_token:
        secrets.add(context.door_token)
    return open_log(context.logs, name, secrets)


def version_cache() -> Path:
    """Where this node keeps copies of versions that lie elsewhere."""
    return Path.home() / ".cache" / "headrace" / "versions"


async def connect_ledger(context: RunContext) -> "RedisLedger":
    """This process's connection to the run's ledger."""
    from headrace.platform.ledger.redis_ledger import RedisLedger

    return await RedisLedger.connect(
        resolve(context.ledger_url), context.run, context.limits, connect_deadline_s=_CONNECT_DEADLINE_S
    )


async def connect_registry(context: RunContext, ledger: Ledger) -> tuple[VersionRegistry, Closing]:
    """This process's view of the version registry in the run root."""
    from headrace.platform.registry.files import FileRegistry
    from headrace.platform.registry.redis_pins import RedisPins

    pins = await RedisPins.connect(resolve(context.ledger_url), context.run, connect_deadline_s=_CONNECT_DEADLINE_S)
    registry = FileRegistry(context.root, ledger, cache_dir=version_cache(), run=context.run, pins=pins)
    return registry, registry.close


# --- serving ----------------------------------------------------------------------------------------------------------


def build_engine(config: RunConfig, model_dir: Path, replica: str, *, inline: bool = False) -> "TorchEngine":
    """A torch engine for models of the shape of `model_dir`; it holds no version yet."""
    from headrace.serving.torch_engine import TorchEngine

    longest = max(environment.budgets.max_tokens for environment in config.environments)
    return TorchEngine(
        replica=replica,
        max_sessions=config.serving.max_sessions,
        max_batch=config.serving.max_batch,
        max_positions=longest,
        policy_id=POLICY_ID,
        threads=config.serving.threads,
        inline=inline,
    )


async def build_replica(context: RunContext, index: int) -> "ReplicaService":
    """Replica number `index`, with its own connections."""
    from headrace.serving.door.server import DoorServer
    from headrace.serving.service import ReplicaService

    name = f"replica-{index}"
    open_process_log(context, name)
    ledger = await connect_ledger(context)
    registry, close_registry = await connect_registry(context, ledger)
    engine = build_engine(context.config, Path(), name)

    async def closing() -> None:
        await close_registry()
        await ledger.close()

    door = DoorServer(engine, context.door_token, name, host=_door_host(context))
    return ReplicaService(engine, name, door, registry, context.keep_versions, closing)


def _door_host(context: RunContext) -> str:
    """Loopback, or in a joined cluster the address under which the other nodes know this one."""
    if not context.config.runtime.ray_address:
        return "127.0.0.1"
    import ray

    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


async def connect_pool(context: RunContext, addresses: Sequence[tuple[str, int]]) -> "Pool":
    """A pool over the replicas at `addresses`."""
    from headrace.serving.door.client import DoorClient
    from headrace.serving.pool import Pool

    pool = Pool()
    for host, port in addresses:
        pool.add(await DoorClient.connect(host, port, context.door_token, deadline_s=_CONNECT_DEADLINE_S))
    return pool


# --- rollouts ---------------------------------------------------------------------------------------------------------


def assemble_worker(
    context: RunContext,
    index: int,
    model_dir: Path,
    generator: TokenGenerator,
    newest_version: Callable[[], int | None],
    ledger: Ledger,
) -> RolloutWorker:
    """A rollout worker over whatever engine and ledger it is given."""
    config, worker_id = context.config, f"rollout-{index}"
    renderer = load_renderer(model_dir)
    settings = WorkerSettings(
        run=context.run,
        worker_id=worker_id,
        policy_id=POLICY_ID,
        group_size=config.learner.algorithm.group_size,
        max_episodes=config.rollout.max_episodes,
        request_deadline_s=config.serving.request_deadline_s,
        digests=Digests(
            tokenizer=renderer.digest,
            template=renderer.digest,
            code=digest_value([code_digest(), *(environment_kind(each.name).digest for each in config.environments)]),
            config=digest_value(config.model_dump(mode="json")),
        ),
    )
    return RolloutWorker(
        settings,
        Worlds(config.environments, "train", config.seed, config.curriculum),
        renderer,
        generator,
        newest_version,
        Delivery(
            ledger=ledger,
            store=EpisodeStore(context.root),
            rewards=RewardTable(context.root, worker_id),
            worker_id=worker_id,
        ),
        lambda split: Worlds(config.environments, split, config.seed, config.curriculum),
        build_scorers(config),
    )


def build_scorers(config: RunConfig) -> dict[str, AsyncScorer]:
    """Scorers by environment: the recipe's, else what the environment brings. Each starts its process when needed."""
    scorers: dict[str, AsyncScorer] = {}
    for environment in config.environments:
        scorer = environment.scorer or environment_kind(environment.name).scorer
        if scorer is not None:
            scorers[environment.known_as] = build_scorer_process(scorer)
    return scorers


async def build_worker(
    context: RunContext, index: int, model_dir: Path, addresses: Sequence[tuple[str, int]]
) -> tuple[RolloutWorker, Closing]:
    """Rollout worker number `index`, with its own connections."""
    tune_collector()
    open_process_log(context, f"rollout-{index}")
    ledger = await connect_ledger(context)
    pool = await connect_pool(context, addresses)
    await pool.wait_version(0, context.config.serving.start_deadline_s)

    async def closing() -> None:
        await pool.close()
        await ledger.close()

    return assemble_worker(context, index, model_dir, pool, pool.newest_version, ledger), closing


# --- learning ---------------------------------------------------------------------------------------------------------


def assemble_learner(
    context: RunContext, model_dir: Path, ledger: Ledger, registry: VersionRegistry, *, inline: bool = False
) -> "Learner":
    """A learner over whatever ledger and registry it is given."""
    import asyncio

    import torch

    from headrace.trainer.algorithms import build_algorithm
    from headrace.trainer.backends import build_backend
    from headrace.trainer.checkpoint import CheckpointStore
    from headrace.trainer.learner import Learner

    config = context.config
    torch.set_num_threads(config.learner.threads)
    store = EpisodeStore(context.root)

    async def read_episodes(file: str, episode_ids: Sequence[str]) -> Sequence[bytes]:
        return await asyncio.to_thread(store.read, file, episode_ids)

    return Learner(
        run=context.run,
        config=config.learner,
        max_lag=config.queue.max_lag,
        backend=build_backend(config.learner, model_dir),
        algorithm=build_algorithm(config.learner.algorithm),
        ledger=ledger,
        registry=registry,
        read_episodes=read_episodes,
        checkpoints=CheckpointStore(f"{context.root}/checkpoints"),
        policy_id=POLICY_ID,
        clock=time.time,
        on_receipts=ReceiptTable(context.root, "learner").append,
        inline=inline,
    )


async def build_learner(context: RunContext, model_dir: Path) -> tuple["Learner", Closing]:
    """The learner, with its own connections."""
    open_process_log(context, "learner")
    ledger = await connect_ledger(context)
    registry, close_registry = await connect_registry(context, ledger)

    async def closing() -> None:
        await close_registry()
        await ledger.close()

    return assemble_learner(context, model_dir, ledger, registry), closing
