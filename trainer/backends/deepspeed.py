"""One rank of a learner on DeepSpeed: weights, optimizer and gradients shared among ranks by ZeRO stages 0 to 3.

Every rank is given the same batch, deals it (dealing.py) and computes its part; gradients are averaged over the ranks,
so each loss counts `world_size` times. Owns what the ranks of a step agree on: that it is the same step (P13), that the
loss is finite before each backward pass, and that the gradient is; else nobody steps, and weights and optimizer are as
before. Who feeds the ranks, and what becomes of one that is lost, is ranked.py's.

A model is loaded whole on every rank before it is parted. On CPUs weights are fp32.
"""

import copy
import logging
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from headrace.platform.config.learner import LearnerConfig
from headrace.platform.contracts import Algorithm
from headrace.platform.records.arrays import F32
from headrace.trainer.backends.deepspeed_engine import EngineLogprobs, gathered, pieces
from headrace.trainer.backends.random_state import random_state, set_random_state
from headrace.trainer.backends.ranked import RankStep
from headrace.trainer.batch import MicroBatch, pack
from headrace.trainer.dealing import deal, round_tokens
from headrace.trainer.devices import learner_device, on_device
from headrace.trainer.forward import TokenLogprobs
from headrace.trainer.model import load_folder
from headrace.trainer.packing import PackedBatch, pack_tokens
from headrace.trainer.ranks import agree, over_gloo, step_digest
from headrace.trainer.samples import Sample
from headrace.trainer.schedule import as_configured, learning_rate
from headrace.trainer.step_loss import StepLoss, episode_names
from headrace.trainer.weights import WEIGHT_FILE, constant_files, serialised, tokenizer_files

_log = logging.getLogger(__name__)
Micro = MicroBatch | PackedBatch
GATHER_BYTES = 1 << 28
"""Weights of ZeRO-3 that are whole at a time while they are written."""
LAYOUT_FILE = "ranks.json"
_TAG = "state"


class RankLayout(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint of ranks can be read by, and where it stands: steps done, and the digest of the last one."""

    world_size: int
    stage: int
    offload_optimizer: bool
    steps: int
    digest: str


class DeepspeedRank:
    """See the module.

    Args:
        model: a Hugging Face folder.
        config: optimizer, ZeRO stage and microbatch size.
        rank: which one this is, of `config.ranks`; the process has joined the others (`deepspeed_engine.join`).

    Raises:
        ConfigError: the model cannot be read, or its layers not computed again for their gradient.
    """

    def __init__(self, model: str | Path, config: LearnerConfig, rank: int) -> None:
        self._config, self._rank = config, rank
        self._gather = over_gloo(config.deepspeed.deadline_s)
        self._few_bytes = dist.new_group(backend="gloo", timeout=timedelta(seconds=config.deepspeed.deadline_s))
        folder = Path(model)
        self.model: Any = load_folder(folder).to(learner_device(config.device))
        self._constant = constant_files(self.model, tokenizer_files(folder))
        self._reference = self._frozen() if config.algorithm.kl.coefficient > 0 else None
        self._forward = EngineLogprobs(self.model, config)
        if self._forward.why_padded:
            _log.info("samples are padded, not packed: %s", self._forward.why_padded)
        self._engine = self._forward.engine
        self._steps, self._digest = 0, "0"

    # --- the step -----------------------------------------------------------------------------------------------------

    def step(self, batch: Sequence[Sample], algorithm: Algorithm) -> RankStep:
        """This rank's part of one optimizer step over `batch`.

        Raises:
            ArithmeticError: the loss of a rank, or the gradient, is not finite; names the episodes, on every rank
                alike. Nothing has changed.
            RunFailed: the ranks are not about to take the same step, or one is lost. Nothing has changed.
            ValueError: no token of `batch` enters the loss.
        """
        loss = StepLoss(batch, self._forward, algorithm, self._reference, self._where())
        digest = step_digest([sample.episode_id for sample in batch], int(self._digest, 16), self._steps + 1)
        agree(digest, self._gather)  # P13
        passes = list(self._passes([micro for micro in self._microbatches(batch) if bool(micro.loss_mask.any())]))
        for number, (micro, counts) in enumerate(passes):
            share, fault = self._share(loss, micro, counts)
            if faults := self._faults(fault):
                self._discard(number, passes)
                raise ArithmeticError("; ".join(faults))
            self._engine.set_gradient_accumulation_boundary(number == len(passes) - 1)
            self._engine.backward(share * self._config.ranks, scale_wrt_gas=False)
        lr = learning_rate(self._config, self._steps)
        norm = self._apply(lr)
        if not math.isfinite(norm):
            raise ArithmeticError(f"{self._where()}: the gradient is not finite; episodes {episode_names(batch)}")
        self._steps += 1
        self._digest = digest
        return RankStep(statistics=loss.statistics, grad_norm=norm, lr=lr)

    def _share(self, loss: StepLoss, micro: Micro, counts: bool) -> tuple[Tensor, str]:
        """This rank's share of the loss, and what is wrong with it."""
        if not counts:
            return self._nothing(micro), ""
        try:
            return loss(micro), ""
        except ArithmeticError as error:
            return torch.zeros(()), str(error)

    def _nothing(self, micro: Micro) -> Tensor:
        """A pass as the others make it, and 0."""
        return self._forward.of(micro, micro.loss_mask).logprobs.sum() * 0.0

    def _faults(self, fault: str) -> list[str]:
        """What is wrong on any rank; every rank hears the same."""
        worst = torch.tensor([bool(fault)], dtype=torch.uint8)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=self._few_bytes)
        if not worst.item():
            return []
        heard: list[str] = [""] * self._config.ranks
        dist.all_gather_object(heard, fault, group=self._few_bytes)
        return [each for each in heard if each]

    def _discard(self, done: int, passes: Sequence[tuple[Micro, bool]]) -> None:
        """Forget the gradients of the `done` passes of this step.

        DeepSpeed keeps them in places of its own, and empties them where it finds a gradient that is not finite.
        """
        if not done:
            return
        self._engine.set_gradient_accumulation_boundary(True)
        micro = passes[0][0]
        poisoned = self._forward.of(micro, micro.loss_mask).logprobs.sum() * math.nan
        self._engine.backward(poisoned, scale_wrt_gas=False)
        self._apply(0.0)

    def _apply(self, lr: float) -> float:
        """Step with the gradient as it is, clipped; its norm before. One that is not finite is thrown away."""
        engine = self._engine
        for group in engine.optimizer.param_groups:
            group["lr"] = lr
        if self._config.deepspeed.stage == 0:
            norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._config.clip_grad))
            if not math.isfinite(norm):
                engine.zero_grad()
                return norm
            engine.step()
            return norm
        engine.step()
        return float(engine.get_global_grad_norm()) if engine.was_step_applied() else math.nan

    def _passes(self, micros: Sequence[Micro]) -> Iterator[tuple[Micro, bool]]:
        """This rank's passes over the microbatches of a step, on its device."""
        dealt = deal([len(micro.token_ids.flatten()) for micro in micros], self._config.ranks)
        for each in dealt[self._rank]:
            yield on_device(micros[each.micro], self._engine.device), each.counts

    def _microbatches(self, batch: Sequence[Sample]) -> Sequence[MicroBatch] | Sequence[PackedBatch]:
        tokens = round_tokens(sum(s.length for s in batch), self._config.ranks, self._config.microbatch_tokens)
        if self._forward.why_padded:
            return pack(batch, tokens)
        return pack_tokens(batch, tokens, self._config.share_prefixes)

    @torch.no_grad()
    def logprobs(self, batch: Sequence[Sample]) -> dict[int, F32]:
        """Logprobs f32[T] of the samples that this rank computes, by their place in `batch`; see `LearnerBackend`."""
        place = {id(sample): n for n, sample in enumerate(batch)}
        found: dict[int, F32] = {}
        for micro, counts in self._passes(self._microbatches(batch)):
            chosen = micro.predicted
            logprobs = torch.zeros(chosen.shape, device=chosen.device)
            logprobs[chosen] = self._forward.of(micro, chosen).logprobs
            if counts:
                for sample, row in zip(micro.rows, micro.by_sample(logprobs), strict=True):
                    found[place[id(sample)]] = row.cpu().numpy().copy()
        return found

    # --- weights and checkpoints --------------------------------------------------------------------------------------

    def weights(self, piece_bytes: int = GATHER_BYTES) -> dict[str, bytes]:
        """The files of a Hugging Face folder, from rank 0; nothing from the others, which must be asked too. What is
        partitioned is whole on the ranks in pieces of at most `piece_bytes`, or of one tensor."""
        tensors = self._whole_tensors(piece_bytes)
        return {} if self._rank else {**self._constant, WEIGHT_FILE: serialised(tensors)}

    def _whole_tensors(self, piece_bytes: int) -> dict[str, Tensor]:
        """Parameters and persistent buffers in the memory of rank 0's host, tied ones once, under their first name."""
        seen: set[int] = set()
        named = []
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                named.append((name, tensor))
        whole: dict[str, Tensor] = {}
        for piece in pieces(named, piece_bytes):
            with gathered([tensor for _, tensor in piece if hasattr(tensor, "ds_id")]):
                if self._rank == 0:
                    whole |= {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in piece}
        return whole

    def save(self) -> dict[str, bytes]:
        """DeepSpeed's files of this rank, its random state, and from rank 0 what they are of."""
        with tempfile.TemporaryDirectory() as folder:
            self._engine.save_checkpoint(folder, tag=_TAG, save_latest=False)
            files = {
                f"{self._mine}{path.name}": path.read_bytes() for path in sorted((Path(folder) / _TAG).glob("*.pt"))
            }
        files[f"{self._mine}random"] = random_state()
        if self._rank == 0:
            files[LAYOUT_FILE] = msgspec.json.encode(self._layout())
        return files

    def restore(self, files: Mapping[str, bytes]) -> None:
        """Take up what all ranks have saved.

        Raises:
            ValueError: it is of other ranks, another stage or another model.
        """
        if LAYOUT_FILE not in files:
            raise ValueError(
                "the checkpoint is not of learner.backend=deepspeed; resume with the backend that wrote it"
            )
        kept = msgspec.json.decode(files[LAYOUT_FILE], type=RankLayout)
        own = self._layout()
        if (kept.world_size, kept.stage, kept.offload_optimizer) != (own.world_size, own.stage, own.offload_optimizer):
            raise ValueError(
                f"the checkpoint is of learner.ranks={kept.world_size}, learner.deepspeed.stage={kept.stage},"
                f" learner.deepspeed.offload_optimizer={str(kept.offload_optimizer).lower()}; resume with these"
            )
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / _TAG).mkdir()
            for name, data in files.items():
                rank, dot, file = name.partition(".")
                if dot and rank.startswith("rank-") and file.endswith(".pt"):
                    (Path(folder) / _TAG / file).write_bytes(data)
            self._engine.load_checkpoint(folder, tag=_TAG, load_lr_scheduler_states=False)
        as_configured(self._engine.optimizer, self._config)
        self._steps, self._digest = kept.steps, kept.digest
        set_random_state(files[f"{self._mine}random"])

    @property
    def _mine(self) -> str:
        return f"rank-{self._rank}."

    def _layout(self) -> RankLayout:
        given = self._config.deepspeed
        return RankLayout(
            world_size=self._config.ranks,
            stage=given.stage,
            offload_optimizer=given.offload_optimizer,
            steps=self._steps,
            digest=self._digest,
        )

    def close(self) -> None:
        """Let go of the engine; the process stays a rank."""
        self._engine.destroy()

    def _frozen(self) -> TokenLogprobs:
        """The weights that the run begins with, whole on every rank."""
        frozen = copy.deepcopy(self.model).requires_grad_(False)
        return TokenLogprobs(frozen, packed=True, dtype=getattr(torch, self._config.dtype))

    def _where(self) -> str:
        return f"learner step {self._steps + 1}"
