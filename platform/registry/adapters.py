"""Versions that are adapters, and the version that each is over (P6). What is done with the two is the engine's."""

from typing import Protocol

from headrace.platform.contracts import VersionRegistry
from headrace.platform.errors import NotFound
from headrace.platform.records.versions import ADAPTER, VersionManifest


class BaseHolder(Protocol):
    """An engine that takes up adapters."""

    @property
    def base_hash(self) -> str:
        """The content hash of the version that its adapters are over; empty where it holds none."""

    async def load_base(self, manifest: VersionManifest, path: str) -> None:
        """Take up the version that adapters are over. Raises EngineError."""


async def load_base_of(engine: BaseHolder, registry: VersionRegistry, manifest: VersionManifest) -> None:
    """Give `engine` the base of a version that is an adapter, unless it has it.

    Raises:
        NotFound: there is no such base in the registry.
        RegistryError: its files are torn or altered.
        EngineError: the engine cannot load it.
    """
    if manifest.kind == ADAPTER and engine.base_hash != manifest.ref.base_hash:
        base = await base_of(registry, manifest)
        await engine.load_base(*await registry.open(base.ref.number))


async def base_of(registry: VersionRegistry, manifest: VersionManifest) -> VersionManifest:
    """The manifest of the version that an adapter is over; of several that are alike the newest, whose files stay.
    Raises NotFound."""
    alike = [each for each in await registry.manifests() if each.content_hash == manifest.ref.base_hash]
    if alike:
        return max(alike, key=lambda each: each.ref.number)
    raise NotFound(f"the base of {manifest.ref}, {manifest.ref.base_hash[:12] or 'which it does not name'}, is gone")
