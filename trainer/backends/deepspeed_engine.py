"""A DeepSpeed engine around a causal language model, and logprobs that go through it.

Whether a model selects hidden states and computes packed rows is found out by trial passes before ZeRO-3 takes its
parameters apart; afterwards every pass goes through the engine, whose hooks bring them together layer by layer. Owns
what of DeepSpeed's configuration is fixed here: one microbatch at a time, accumulation by hand, AdamW of torch.
"""

import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from headrace.platform.config.learner import LearnerConfig
from headrace.platform.errors import ConfigError
from headrace.trainer.batch import MicroBatch
from headrace.trainer.devices import learner_device
from headrace.trainer.forward import TokenLogprobs, TokenOutputs
from headrace.trainer.packing import PackedBatch
from headrace.trainer.recomputing import recompute_layers


class EngineLogprobs(TokenLogprobs):
    """Logprobs under the weights of an engine. Every rank must make the same calls.

    Args:
        model: a causal language model, whole.
        config: the learner's.
    """

    def __init__(self, model: Any, config: LearnerConfig) -> None:
        super().__init__(model, packed=True, dtype=getattr(torch, config.dtype))
        if config.gradient_checkpointing:
            recompute_layers(model)
        self.engine: Any = _engine(_Whole(model, self), model, config)

    def of(self, batch: MicroBatch | PackedBatch, chosen: Tensor, entropy: bool = False) -> TokenOutputs:
        """See `TokenLogprobs.of`; there are no hidden states."""
        found = self.engine(batch, chosen, entropy)
        return TokenOutputs(logprobs=found[0], entropy=found[1] if entropy else None)


class _Whole(nn.Module):
    """A whole pass as one module with one output, as ZeRO-3 counts passes by calls of the outermost module, and brings
    parameters together once for each output that has a gradient: ranks whose losses use others would part ways."""

    def __init__(self, model: nn.Module, logprobs: EngineLogprobs) -> None:
        super().__init__()
        self.model = model
        self._inner = [logprobs]  # in a list, so that it is not looked at for parameters

    def forward(self, batch: MicroBatch | PackedBatch, chosen: Tensor, entropy: bool) -> Tensor:
        """Logprobs f32[1, N], or with entropies f32[2, N]."""
        outputs = TokenLogprobs.of(self._inner[0], batch, chosen, entropy)
        found = [outputs.logprobs] if outputs.entropy is None else [outputs.logprobs, outputs.entropy]
        return torch.stack(found)


def join(rank: int, config: LearnerConfig, address: str, port: int, store: Any = None) -> None:
    """Make this process rank number `rank` of `config.ranks`, once, before its first engine.

    Args:
        rank: which one.
        config: the learner's.
        address: where rank 0 listens.
        port: of its store there.
        store: rank 0's own; the others connect to it.

    Raises:
        ConfigError: DeepSpeed is not installed.
        RuntimeError: the ranks do not come together within `config.deepspeed.deadline_s`.
    """
    torch.set_num_threads(config.threads)
    on_gpu = learner_device(config.device).type == "cuda"
    # Read by DeepSpeed and by gloo. A rank sees one GPU, its own.
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(config.ranks), LOCAL_RANK="0")
    os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(port), OMP_NUM_THREADS=str(config.threads))
    if not on_gpu:
        os.environ["DS_ACCELERATOR"] = "cpu"
    if address.startswith("127."):
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    # DeepSpeed still calls the older names of torch's collectives.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    try:
        import deepspeed
    except ImportError:
        raise ConfigError("DeepSpeed is not installed on this node: pip install 'headrace[deepspeed]'") from None
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    if not on_gpu:  # it would be compiled, for minutes, to save microseconds
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    timeout = timedelta(seconds=config.deepspeed.deadline_s)
    if store is None:
        store = dist.TCPStore(address, port, config.ranks, False, timeout)  # type: ignore[attr-defined]
    dist.init_process_group(
        "nccl" if on_gpu else "gloo", store=store, rank=rank, world_size=config.ranks, timeout=timeout
    )


def gathered(parameters: Sequence[Tensor]) -> Any:
    """A context in which partitioned parameters are whole; every rank must enter it."""
    import deepspeed

    return deepspeed.zero.GatheredParameters(list(parameters))


def pieces(tensors: Sequence[tuple[str, Tensor]], limit: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Named tensors in order, in pieces of at most `limit` bytes when whole; one that is larger is a piece itself."""
    piece: list[tuple[str, Tensor]] = []
    held = 0
    for name, tensor in tensors:
        size = whole_bytes(tensor)
        if piece and held + size > limit:
            yield piece
            piece, held = [], 0
        piece.append((name, tensor))
        held += size
    if piece:
        yield piece


def whole_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor, of a partitioned parameter those of all its parts."""
    return int(getattr(tensor, "ds_numel", tensor.numel())) * tensor.element_size()


def _engine(whole: nn.Module, model: nn.Module, config: LearnerConfig) -> Any:
    import deepspeed

    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.lr, betas=config.betas, weight_decay=config.weight_decay
    )
    engine, *_ = deepspeed.initialize(model=whole, optimizer=optimizer, config=engine_config(config))
    engine.eval()  # dropout would make the ratio of fresh weights noise
    return engine


def engine_config(config: LearnerConfig) -> dict[str, Any]:
    """DeepSpeed's configuration. Without partitions the gradient is clipped by whoever steps."""
    given = config.deepspeed
    zero: dict[str, Any] = {"stage": given.stage, "overlap_comm": False}
    if given.stage == 3:
        zero["stage3_param_persistence_threshold"] = given.persist_below
    if given.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": learner_device(config.device).type == "cuda"}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": config.clip_grad if given.stage else 0.0,
        "steps_per_print": None,
    }
