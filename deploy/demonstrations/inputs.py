"""What supervised stages read besides the recipe, as hashes: the part of their cache key that lies in files.

Data files and the user's own code are hashed by content. Episode files are written once and side tables only added
to, so names and sizes stand for what is in a run root.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headrace.actors.demonstrations.chats import check_chat_file
from headrace.actors.environments.registry import environment_kind
from headrace.platform.config import RunConfig, SftStageConfig
from headrace.platform.errors import ConfigError
from headrace.platform.store.files import open_url
from headrace.platform.store.run_root import RunRoot

_BLOCK = 1 << 20


def stage_inputs(config: RunConfig) -> dict[str, Any]:
    """JSON-safe; differs when a stage would be shown other traces, or measured in another world.

    Raises:
        ConfigError: a data file does not exist, or is none of chats by its name.
        NotFound: a run does not exist.
    """
    return {
        "stages": [_stage(config, stage) for stage in config.sft.stages] if config.sft else [],
        "environments": [environment_kind(environment.name).digest for environment in config.environments],
        "files": {
            path: file_digest(Path(path))
            for environment in config.environments
            for path in _named_files(environment.model_dump(mode="json"))
        },
    }


def file_digest(path: Path) -> str:
    """SHA-256 of a file's content in hex. Raises ConfigError where there is none."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(_BLOCK):
                digest.update(block)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    return digest.hexdigest()


def _stage(config: RunConfig, stage: SftStageConfig) -> Any:
    if stage.data:
        check_chat_file(Path(stage.data))
        return file_digest(Path(stage.data))
    if stage.episodes:
        root = RunRoot.find(config.runs_dir, stage.episodes)
        return [root.url, *_stored(root.join("episodes")), *_stored(root.join("rewards"))]
    return ""


def _stored(url: str) -> list[tuple[str, int]]:
    """Names and sizes of what a run root holds: episodes are never changed, rewards only added to."""
    fs, path = open_url(url)
    fs.invalidate_cache()
    return sorted((str(name), int(info["size"] or 0)) for name, info in fs.find(path, detail=True).items())


def _named_files(node: Any) -> Iterator[str]:
    """Files that exist and that some text in `node` names by an absolute path, alone or as `FILE:NAME`."""
    if isinstance(node, str):
        path = node if Path(node).suffix != "" and ":" not in Path(node).suffix else node.rpartition(":")[0]
        if path.startswith("/") and Path(path).is_file():
            yield path
    elif isinstance(node, dict | list):
        for child in node.values() if isinstance(node, dict) else node:
            yield from _named_files(child)
