"""The base model where every node of a joined cluster finds it: in `base/` of the run root.

Nodes share a local root by its path, and read the model in place. From any other root each node copies it once, checked
against its hashes, as it does with versions.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

from headrace.deploy.context import RunContext
from headrace.platform.node_cache import node_cache
from headrace.platform.registry.blobs import BlobStore
from headrace.platform.registry.hashing import file_hash
from headrace.platform.store.run_root import RunRoot

_FOLDER = "base"


@dataclass(frozen=True, slots=True)
class SharedModel:
    """A model in a run root that is not local: sha256 by file name."""

    hashes: dict[str, str]


def share_model(context: RunContext, model_dir: Path) -> "Path | SharedModel":
    """Put the model of this node into the run root. Blocks. Raises DiskFull."""
    root = RunRoot(context.root)
    if root.is_local:
        return Path(shutil.copytree(model_dir, root.local(_FOLDER), dirs_exist_ok=True))
    files = {file.name: file.read_bytes() for file in model_dir.iterdir() if file.is_file()}
    BlobStore(root.url).write_folder(_FOLDER, files)
    return SharedModel({name: file_hash(data) for name, data in files.items()})


def model_here(context: RunContext, model: "Path | SharedModel") -> Path:
    """The folder of the model on this node. Blocks.

    Raises:
        RegistryError: what is in the run root is not what was put there.
    """
    if isinstance(model, Path):
        return model
    return Path(BlobStore(context.root).copy_verified(_FOLDER, model.hashes, node_cache() / "versions" / context.run))
