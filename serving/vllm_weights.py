"""How new weights get into a running vLLM, and which are let in.

Owns the check of a model folder before anything changes (case S4) and the transport of its bytes. Pausing, resuming and
what a failure means are the engine's. `WeightTransport` is the seam: `FileWeights` has vLLM read a folder of this host.
"""

import json
from collections.abc import Awaitable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias

from safetensors import safe_open

from headrace.platform.errors import EngineError
from headrace.platform.records.versions import VersionManifest, VersionRef

_NOT_ARCHITECTURE = ("transformers_version", "_name_or_path", "dtype", "torch_dtype")

Layout: TypeAlias = dict[str, tuple[str, tuple[int, ...]]]
"""Of each tensor of a folder: its type and shape."""


class Rpc(Protocol):
    """Calls a method of every worker of vLLM and waits for all of them, under a deadline."""

    def __call__(self, method: str, **arguments: Any) -> Awaitable[object]:
        """Raises what the workers raise."""


class WeightTransport(Protocol):
    """Brings the bytes of a version into a paused engine."""

    @property
    def engine_args(self) -> Mapping[str, Any]:
        """What vLLM has to be started with for it, beside everything else."""

    def check(self, path: str) -> None:
        """Refuse, before anything changes, what the running model cannot take. Blocks on the disk.

        The first folder ever checked is taken for that of the running model.

        Raises:
            EngineError: the message names the folder and what is wrong.
        """

    async def update(self, rpc: Rpc, path: str) -> None:
        """Put the weights of the version in `path` in place of the present ones. Raises whatever goes wrong."""


class FileWeights:
    """Weights come from a folder with config.json and safetensors."""

    engine_args: Mapping[str, Any] = MappingProxyType({})

    def __init__(self) -> None:
        self._architecture: dict[str, Any] = {}
        self._layout: Layout = {}

    def check(self, path: str) -> None:
        """See `WeightTransport`: the architecture, and the name, type and shape of every tensor."""
        architecture, layout = read_architecture(path), read_layout(path)
        if self._layout and architecture != self._architecture:
            raise EngineError(f"{path} has another architecture than the model that runs")
        if self._layout and layout != self._layout:
            names = sorted(
                name for name in layout.keys() | self._layout.keys() if layout.get(name) != self._layout.get(name)
            )
            raise EngineError(f"{path} has other tensors than the model that runs: {names[:5]}")
        self._architecture, self._layout = architecture, layout

    async def update(self, rpc: Rpc, path: str) -> None:
        """See `WeightTransport`."""
        await rpc("take_up_weights", weights_path=path)


def read_architecture(path: str) -> dict[str, Any]:
    """The configuration in a model folder, without what says nothing of the model. Raises EngineError."""
    try:
        config = json.loads((Path(path) / "config.json").read_text())
        return {key: value for key, value in config.items() if key not in _NOT_ARCHITECTURE}
    except (OSError, ValueError, AttributeError) as error:
        raise EngineError(f"cannot read the configuration in {path}: {error}") from error


def vocabulary_of(path: str) -> int:
    """The number of token ids that the model in `path` knows. Raises EngineError."""
    architecture = read_architecture(path)
    size = architecture.get("vocab_size") or (architecture.get("text_config") or {}).get("vocab_size")
    if not isinstance(size, int):
        raise EngineError(f"the configuration in {path} has no vocab_size")
    return size


def read_layout(path: str) -> Layout:
    """The tensors of a model folder by the headers of its files, which must be whole. Raises EngineError."""
    layout: Layout = {}
    try:
        for file in sorted(Path(path).glob("*.safetensors")):
            with safe_open(file, framework="np") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (it is no mapping)
                    tensor = tensors.get_slice(name)
                    layout[name] = (str(tensor.get_dtype()), tuple(tensor.get_shape()))
    except Exception as error:  # the boundary to files that anyone may have written
        raise EngineError(f"cannot read the tensors in {path}: {type(error).__name__}: {error}") from error
    if not layout:
        raise EngineError(f"{path} has no tensors in safetensors files")
    return layout


def check_adapter(manifest: VersionManifest, path: str, base: VersionManifest, max_rank: int) -> None:
    """Refuse an adapter that is not one for `base`, the base that runs.

    Raises:
        EngineError: it is of another base, of a higher rank, or no folder of peft's.
    """
    ref = manifest.ref
    if manifest.kind != "adapter" or not ref.adapter_id:
        raise EngineError(f"{ref} is no adapter, and this engine holds adapters over {base.ref}")
    if ref.base_hash != base.content_hash:
        raise EngineError(f"{ref} is an adapter over another base than {base.ref}")
    try:
        config = json.loads((Path(path) / "adapter_config.json").read_text())
        rank = int(config["r"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EngineError(f"cannot read the adapter in {path}: {error}") from error
    if rank > max_rank:
        raise EngineError(f"the adapter in {path} has rank {rank}; serving.vllm.max_lora_rank is {max_rank}")
    read_layout(path)


def check_kind(ref: VersionRef, kind: str) -> None:
    """Refuse anything but full weights. Raises EngineError."""
    if kind != "full":
        raise EngineError(f"{ref} is of kind {kind!r}; without serving.vllm.adapters this engine takes full weights")
