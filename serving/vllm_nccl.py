"""Weights from the learner's GPUs to vLLM's, by vLLM's own transfer engine over NCCL. Not run here: it needs GPUs.

`NcclWeights` is the replica's end, `NcclSender` the learner's, which holds the newest version's tensors on its device.
What the two say to one another is in `weight_link.py`.
"""

import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

from headrace.platform.errors import ConfigError
from headrace.serving.vllm_weights import FileWeights, Rpc
from headrace.serving.weight_link import Call, fetch

Address = tuple[str, int]


class NcclWeights(FileWeights):
    """A `WeightTransport`: from the learner while it has the version, else from the files, which are there in any case.

    Args:
        address: where the learner offers weights now; None where it does not yet.
        token: of the run's doors.
        shards: of this replica.
        deadline_s: how long one transfer may take.
    """

    engine_args = MappingProxyType({"weight_transfer_config": {"backend": "nccl"}})

    def __init__(self, address: Callable[[], Address | None], token: str, shards: int, deadline_s: float) -> None:
        super().__init__()
        self._address, self._token, self._shards, self._deadline_s = address, token, shards, deadline_s

    async def update(self, rpc: Rpc, path: str) -> None:
        """See `WeightTransport`."""
        address = self._address()
        name = Path(path).name
        if address is None or not await fetch(address, self._token, name, self._shards, rpc, self._deadline_s):
            await super().update(rpc, path)


class NcclSender:
    """The `Send` of a `WeightOffer`: vLLM's trainer side, rank 0 of a group with one replica's shards.

    Args:
        host: under which the replicas reach this process.
        device: of the learner, for example "cuda:0".
    """

    def __init__(self, host: str, device: str) -> None:
        self._host, self._device = host, device
        self._tensors: dict[str, Any] = {}

    def take_up(self, weight_file: bytes) -> None:
        """From now on send the tensors of this safetensors file."""
        from safetensors.torch import load

        self._tensors = {name: tensor.to(self._device) for name, tensor in load(weight_file).items()}

    def __call__(self, shards: int, perform: Callable[[Call], None]) -> None:
        """Send to the replica behind `perform`. Blocks; raises whatever NCCL or the replica raises."""
        from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine

        tensors = self._tensors

        class Source(WeightSource):  # type: ignore[misc, unused-ignore]
            def metadata(self) -> list[Any]:
                return [ParamMeta(name, each.dtype, tuple(each.shape)) for name, each in tensors.items()]

            def __iter__(self) -> Iterator[tuple[str, Any]]:
                return iter(tensors.items())

        info = NCCLTrainerInitInfo(
            rank=0, master_address=self._host, master_port=_free_port(self._host), world_size=1 + shards
        )
        engine = NCCLTrainerWeightTransferEngine.trainer_init(info, client=_Replica(perform), source=Source())
        try:
            engine.send_weights()
        finally:
            engine.shutdown()


class _Replica:
    """What vLLM's trainer side calls an inference engine."""

    def __init__(self, perform: Callable[[Call], None]) -> None:
        self._perform = perform

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._perform(Call("init_weight_transfer_engine", {"init_info": init_info}))

    def start_weight_update(self) -> None:
        self._perform(Call("start_weight_update"))

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        self._perform(Call("update_weights", {"update_info": update_info}))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._perform(Call("finish_weight_update"))


def check_nccl() -> None:
    """Raises ConfigError where there is no GPU to send from."""
    import torch

    if not torch.cuda.is_available():
        raise ConfigError("serving.transport=nccl needs GPUs on both sides; use serving.transport=file, the default")


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
