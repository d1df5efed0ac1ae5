"""A version of a stored run, ready to play episodes in this process: its engine, its renderer, its scorers."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from headrace.actors.environments.registry import environment_kind
from headrace.actors.plan import AsyncScorer
from headrace.actors.rendering import load_renderer
from headrace.deploy.engines import build_engine
from headrace.deploy.source_digest import code_digest
from headrace.deploy.stored_version import open_version
from headrace.deploy.wiring import build_scorers
from headrace.platform.config import RunConfig
from headrace.platform.contracts import Renderer, TokenGenerator
from headrace.platform.hashing import digest_value
from headrace.platform.records.episode import Digests
from headrace.platform.records.versions import VersionRef
from headrace.platform.store.run_root import RunRoot


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredPolicy:
    """What plays. `scorers` are by environment, as the recipe knows it."""

    version: VersionRef
    renderer: Renderer
    generator: TokenGenerator
    scorers: dict[str, AsyncScorer]
    digests: Digests


@contextlib.asynccontextmanager
async def stored_policy(root: RunRoot, version: str, config: RunConfig) -> AsyncIterator[StoredPolicy]:
    """The version of a run, by number, `latest` or `best`; `config` says on which environments it plays.

    Raises:
        ConfigError: `version` is none of these.
        NotFound: there is no such version, or its weights were removed.
        RegistryError: its files are torn or altered.
    """
    manifest, folder = await open_version(root, version)
    renderer, scorers = load_renderer(folder), build_scorers(config.environments)
    engine = build_engine(config, folder, "replay", inline=True)
    try:
        await engine.load(manifest, str(folder))
        yield StoredPolicy(
            version=manifest.ref,
            renderer=renderer,
            generator=engine,
            scorers=scorers,
            digests=Digests(
                tokenizer=renderer.digest,
                template=renderer.digest,
                code=digest_value([code_digest(), *(environment_kind(e.name).digest for e in config.environments)]),
                config=digest_value(config.model_dump(mode="json")),
            ),
        )
    finally:
        await engine.close()
        for scorer in scorers.values():
            await scorer.close()
