"""The public door opened: an HTTP server on this process's event loop, over a stored version or a worker's pool.

Without a token a door listens on loopback only. It belongs to whoever opened it and ends with it; requests that are
under way when it is closed get a grace period.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import uvicorn
from tokenizers import Tokenizer

from headrace.actors.harness.asking import Language
from headrace.actors.harness.door import HarnessDoor
from headrace.actors.harness.environment import HARNESS, harness_args
from headrace.actors.harness.play import Doorway
from headrace.actors.rendering import load_renderer
from headrace.deploy.context import POLICY_ID
from headrace.deploy.engines import build_engine
from headrace.deploy.stored_version import open_version
from headrace.platform.config import RunConfig
from headrace.platform.config.secret_references import resolve
from headrace.platform.contracts import Conversations, TokenGenerator
from headrace.platform.errors import ConfigError
from headrace.platform.observability.parts import Part
from headrace.platform.records.versions import VersionManifest
from headrace.platform.store.run_root import RunRoot
from headrace.serving.openai.app import build_app
from headrace.serving.openai.entry import is_loopback

_log = logging.getLogger(__name__)
_START_S = 30.0


class PublicDoor:
    """A server for `Conversations`.

    Args:
        host: where to listen.
        port: 0 takes a free one; `port` says which.
        grace_s: how long requests that are under way may take when it is closed.

    Raises:
        ConfigError: anybody could come in, as there is no token and `host` is not loopback.
    """

    def __init__(
        self, conversations: Conversations, *, host: str, port: int, token: str = "", grace_s: float = 5.0
    ) -> None:
        check_reach(host, token)
        self.host, self.port = host, port
        config = uvicorn.Config(
            build_app(conversations, token=token, is_local=not token),
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=max(1, round(grace_s)),
        )
        self._server = _Server(config)
        self._serving: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """The root, such as http://127.0.0.1:8600."""
        return f"http://[{self.host}]:{self.port}" if ":" in self.host else f"http://{self.host}:{self.port}"

    async def start(self) -> None:
        """Listen. Raises ConfigError where that is not possible."""
        listening = _bound(self.host, self.port)
        self.port = listening.getsockname()[1]
        self._serving = asyncio.create_task(self._server.serve(sockets=[listening]), name="public door")
        ready = asyncio.ensure_future(self._server.ready.wait())
        await asyncio.wait({ready, self._serving}, timeout=_START_S, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if not self._server.ready.is_set():
            raise ConfigError(f"the door at {self.url} did not open")

    async def close(self) -> None:
        """Take no more requests, and let those under way end. Safe to call twice."""
        self._server.should_exit = True
        if self._serving is not None:
            await self._serving
            self._serving = None


class _Server(uvicorn.Server):
    """Leaves signals to whoever runs the process, and says when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def check_reach(host: str, token: str) -> None:
    """Raises ConfigError for a door that anybody could use."""
    if not token and not is_loopback(host):
        raise ConfigError(f"{host} can be reached from other machines: give a token, or use 127.0.0.1")


def _bound(host: str, port: int) -> socket.socket:
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind(address)
        except OSError:
            listening.close()
            raise
    except OSError as error:
        raise ConfigError(f"cannot listen at {host} port {port}: {error.strerror or error}") from None
    return listening


def language_of(model_dir: Path) -> Language:
    """How the policy in a model folder is talked to."""
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    vocabulary = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())
    return Language(renderer=load_renderer(model_dir), encode=encode, vocabulary=vocabulary)


# --- for the workers of a run -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WorkerDoors:
    """The doors of a worker: what is played through them by environment, and their servers."""

    doorways: dict[str, Doorway] = field(default_factory=dict)
    servers: list[PublicDoor] = field(default_factory=list)

    async def close(self) -> None:
        """Close every door."""
        for doorway in self.doorways.values():
            doorway.door.begin_drain()
        for server in self.servers:
            await server.close()


async def open_worker_doors(
    config: RunConfig, index: int, model_dir: Path, generator: TokenGenerator, part: Part | None = None
) -> WorkerDoors:
    """A listening door for each `harness` environment of a recipe, for worker number `index`; `part` says where.

    Raises:
        ConfigError: an environment has no scorer, a token is missing, or a port is taken.
    """
    doors = WorkerDoors()
    try:
        for environment in config.environments:
            if environment.name != HARNESS:
                continue
            if environment.scorer is None:
                raise ConfigError(
                    f"environments.{environment.known_as} has no scorer: a harness gives no rewards, so name who grades"
                )
            args = harness_args(environment.args)
            token = resolve(args.token) if args.token else ""
            door = HarnessDoor(
                language_of(model_dir),
                generator,
                POLICY_ID,
                generator.versions,
                max_tokens=environment.budgets.max_tokens,
                deadline_s=config.serving.request_deadline_s,
            )
            public = PublicDoor(door, host=args.host, port=args.port + index if args.port else 0, token=token)
            await public.start()
            doors.servers.append(public)
            doors.doorways[environment.known_as] = Doorway(door=door, args=args, url=public.url, token=token)
            _log.info("harnesses play %s at %s", environment.known_as, public.url)
            if part is not None:
                part.note(**{f"door of {environment.known_as}": public.url})
    except BaseException:
        await doors.close()
        raise
    return doors


# --- for a stored version ---------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def stored_conversations(root: RunRoot, version: str, config: RunConfig) -> AsyncIterator[HarnessDoor]:
    """A door over one version of a run, with an engine in this process.

    Raises:
        ConfigError: `version` is no number, `latest` or `best`.
        NotFound: there is no such version, or its weights were removed.
        RegistryError: its files are torn or altered.
    """
    manifest, folder = await open_version(root, version)
    async with folder_conversations(manifest, folder, config) as door:
        yield door


@contextlib.asynccontextmanager
async def folder_conversations(
    manifest: VersionManifest, folder: Path, config: RunConfig
) -> AsyncIterator[HarnessDoor]:
    """The same over a version's files."""
    language = language_of(folder)
    engine = build_engine(config, folder, "serve")
    try:
        await engine.load(manifest, str(folder))
        yield HarnessDoor(
            language,
            engine,
            POLICY_ID,
            engine.versions,
            max_tokens=max(environment.budgets.max_tokens for environment in config.environments),
            deadline_s=config.serving.request_deadline_s,
        )
    finally:
        await engine.close()
