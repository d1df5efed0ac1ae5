"""The model card of an exported version: what the weights are and where they come from.

Lineage is read from the manifests, which stay when weights are removed; every manifest names its parent's content hash,
and that is checked (P8). Paths of this machine stay out of the card.
"""

import re
from collections.abc import Iterator, Mapping, Sequence

import msgspec
from pydantic import ValidationError

from headrace.platform.config import RunConfig
from headrace.platform.config.yaml_text import parse_yaml
from headrace.platform.errors import ConfigError, RegistryError
from headrace.platform.records.versions import VersionManifest
from headrace.platform.registry.blobs import BlobStore
from headrace.platform.registry.hashing import manifest_file
from headrace.platform.store.run_root import RunRoot

ADAPTER = "adapter"
_SHOWN = 8
_MANIFEST = re.compile(r"(\d{6,})\.json")


def stored_manifests(root: RunRoot) -> Iterator[VersionManifest]:
    """Every manifest of a run that can be read, oldest first."""
    store = BlobStore(root.url)
    for name in store.names("versions"):
        if (found := _MANIFEST.fullmatch(name)) and (manifest := _manifest(store, int(found[1]))) is not None:
            yield manifest


def lineage(root: RunRoot, manifest: VersionManifest) -> list[int]:
    """The number of a version and those of its ancestors, newest first, as far as manifests are there.

    Raises:
        RegistryError: a stored ancestor is not the one that its child was made from.
    """
    store, numbers = BlobStore(root.url), [manifest.ref.number]
    while manifest.parent is not None and (parent := _manifest(store, manifest.parent)) is not None:
        if parent.content_hash != manifest.parent_hash:
            raise RegistryError(
                f"version {manifest.ref.number} was made from a version {manifest.parent} with another content hash"
                " than the one that is stored"
            )
        manifest = parent
        numbers.append(manifest.ref.number)
    return numbers


def model_card(root: RunRoot, manifest: VersionManifest, ancestors: Sequence[int], *, merged: bool = False) -> str:
    """README.md for the folder of a version; `ancestors` as `lineage` returns them, `merged` as exported."""
    adapter = manifest.kind == ADAPTER and not merged
    shown = [f"v{number}" for number in ancestors[:_SHOWN]] + ["…"] * (len(ancestors) > _SHOWN)
    facts = {
        "Run": root.name,
        "Version": f"{manifest.ref.number} ({'adapter' if adapter else 'whole weights'})",
        "Content hash": manifest.content_hash,
        "Learner batches": str(manifest.batches),
        "Lineage": f"{' ← '.join(shown)} ({len(ancestors)} versions)",
        **_recipe(root),
    }
    lines = "".join(f"| {name} | {text} |\n" for name, text in facts.items())
    return (
        f"---\nlibrary_name: {'peft' if adapter else 'transformers'}\ntags: [headrace, reinforcement-learning]\n---\n"
        f"# {root.name}, version {manifest.ref.number}\n\n"
        f"A language-model agent, trained by reinforcement learning with headrace.\n\n| | |\n|---|---|\n{lines}"
    )


def _manifest(store: BlobStore, number: int) -> VersionManifest | None:
    try:
        return msgspec.json.decode(store.read(manifest_file(number)), type=VersionManifest)
    except (FileNotFoundError, msgspec.DecodeError):  # a torn manifest was never committed
        return None


def _recipe(root: RunRoot) -> Mapping[str, str]:
    """What the run's recipe says; nothing where another build's recipe cannot be read."""
    try:
        config = RunConfig.model_validate(parse_yaml(root.read_config()))
    except (FileNotFoundError, ConfigError, ValidationError):
        return {}
    return {
        "Recipe": config.name,
        "Seed": str(config.seed),
        "Environments": ", ".join(environment.known_as for environment in config.environments),
        "Algorithm": config.learner.algorithm.name,
    }
