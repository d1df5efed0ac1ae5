"""The learner in one process: plain PyTorch, fp32 weights or adapters over them, AdamW.

Owns the weights, the optimizer and their place in the schedule. One `step` is one optimizer step over all samples,
however many microbatches it takes: the loss is a mean over the step's loss tokens, so the gradient does not depend on
how samples were packed or in which order they came (case V6). On a CPU with a fixed number of threads the same
samples give the same loss to the last digit. A step whose loss or gradient is not finite changes nothing.
"""

import copy
import hashlib
import io
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace.platform.config.algorithm import PpoConfig
from headrace.platform.config.learner import LearnerConfig
from headrace.platform.contracts import Algorithm
from headrace.platform.errors import RunFailed
from headrace.platform.records.arrays import F32
from headrace.trainer.backends.random_state import random_state, set_random_state
from headrace.trainer.batch import MicroBatch, pack
from headrace.trainer.critic import Critic
from headrace.trainer.devices import learner_device, on_device
from headrace.trainer.forward import TokenLogprobs
from headrace.trainer.lora import Adapters
from headrace.trainer.model import load_folder
from headrace.trainer.packing import PackedBatch, pack_tokens
from headrace.trainer.recomputing import recompute_layers
from headrace.trainer.samples import Sample
from headrace.trainer.schedule import as_configured, learning_rate
from headrace.trainer.step_loss import StepLoss, episode_names
from headrace.trainer.step_statistics import StepStatistics
from headrace.trainer.weights import (
    WEIGHT_FILE,
    constant_files,
    load_weight_file,
    tensor_file,
    tokenizer_files,
    weight_file,
)

_log = logging.getLogger(__name__)
OPTIMIZER_FILE = "optimizer.pt"
RANDOM_FILE = "random.pt"
ORIGIN_FILE = "origin.sha256"
"""Of the weights that the run began with, in checkpoints of a run that goes on needing them: below adapters, or as the
reference."""


class TorchBackend:
    """See the module.

    Args:
        model: a Hugging Face folder, or a causal language model already built (whose weights are then trained in
            place).
        config: device, optimizer and microbatch size. `config.threads` is set for the whole process.
        tokenizer: tokenizer files by name, for a model that came without a folder.
    """

    def __init__(self, model: str | Path | Any, config: LearnerConfig, tokenizer: Mapping[str, bytes] = {}) -> None:
        torch.set_num_threads(config.threads)
        if isinstance(model, str | Path):
            tokenizer = tokenizer_files(Path(model))
            model = load_folder(model)
        self._device = learner_device(config.device)
        self.model: Any = model.float().to(self._device)
        self._config = config
        self._dtype: torch.dtype = getattr(torch, config.dtype)
        self._constant, self._tokenizer = constant_files(self.model, tokenizer), dict(tokenizer)
        self._adapters = Adapters(self.model, config.lora) if config.lora.rank else None
        self._reference = self._frozen() if config.algorithm.kl.coefficient > 0 else None
        self._origin = self._hash_of_origin() if self._adapters is not None or self._reference is not None else b""
        self._token_logprobs = TokenLogprobs(self.model, packed=True, dtype=self._dtype)
        self._critic = self._new_critic()
        if config.gradient_checkpointing:
            recompute_layers(self.model)
        if self.why_padded:
            _log.info("samples are padded, not packed: %s", self.why_padded)
        learning = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(
            learning, lr=config.lr, betas=config.betas, weight_decay=config.weight_decay
        )
        self._steps = 0

    def step(self, batch: Sequence[Sample], algorithm: Algorithm) -> StepStatistics:
        """One optimizer step over `batch`.

        Raises:
            ArithmeticError: when the loss or its gradient is not finite; names the episodes. Nothing has changed.
            ValueError: when no token of `batch` enters the loss.
        """
        critic = self._critic if algorithm.needs.values else None
        environment = self._config.environment_loss.coefficient
        loss = StepLoss(batch, self._token_logprobs, algorithm, self._reference, self._where(), critic, environment)
        self._forget_gradients()
        policy_learns = critic is None or not critic.warming_up
        micros = [micro for micro in self._microbatches(batch) if bool(micro.loss_mask.any())]
        try:
            for micro in micros:
                loss(micro).backward()  # type: ignore[no-untyped-call]
            grad_norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._config.clip_grad))
            if not np.isfinite(grad_norm + (0.0 if critic is None else critic.clip())):
                raise ArithmeticError(f"{self._where()}: the gradient is not finite; episodes {episode_names(batch)}")
            if critic is not None:
                self._step_critic(critic, micros, loss.values, batch)
        except ArithmeticError:
            self._forget_gradients()
            raise
        lr = learning_rate(self._config, self._steps - self._before_policy) if policy_learns else 0.0
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        if policy_learns:
            self._optimizer.step()
        self._forget_gradients()
        self._steps += 1
        return loss.statistics.build(grad_norm, lr)

    @torch.no_grad()
    def logprobs(self, batch: Sequence[Sample]) -> list[F32]:
        """Logprobs f32[T] of each sample's tokens, in the order of `batch`; 0 for token 0, which nothing predicts."""
        found: dict[int, F32] = {}
        for micro in self._microbatches(batch):
            chosen = micro.predicted
            logprobs = torch.zeros(chosen.shape, device=chosen.device)
            logprobs[chosen] = self._token_logprobs.of(micro, chosen).logprobs
            for sample, row in zip(micro.rows, micro.by_sample(logprobs), strict=True):
                found[id(sample)] = row.cpu().numpy().copy()
        return [found[id(sample)] for sample in batch]

    @torch.no_grad()
    def values(self, batch: Sequence[Sample]) -> list[F32]:
        """The critic's values f32[T] of the states after each sample's tokens, in the order of `batch`.

        Raises:
            ValueError: the configuration's algorithm has no critic.
        """
        if self._critic is None:
            raise ValueError("this learner's algorithm has no critic, so states have no values")
        found: dict[int, F32] = {}
        for micro in self._microbatches(batch):
            found.update(zip(map(id, micro.rows), self._critic.values(micro), strict=True))
        return [found[id(sample)] for sample in batch]

    def weights(self) -> dict[str, bytes]:
        """The files of a Hugging Face folder that holds the present weights, or of one of peft's that holds the
        present adapters; only the tensors are made anew."""
        if self._adapters is not None:
            return {**self._tokenizer, **self._adapters.files()}
        return {**self._constant, WEIGHT_FILE: weight_file(self.model)}

    def base(self) -> dict[str, bytes]:
        """The files of the model that `weights` are adapters over; none where they are whole themselves."""
        if self._adapters is None:
            return {}
        return {**self._constant, WEIGHT_FILE: tensor_file(self._adapters.base())}

    def save(self) -> dict[str, bytes]:
        """Weights, optimizer, position in the schedule, torch's and NumPy's random states, and the critic."""
        optimizer = {"optimizer": self._optimizer.state_dict(), "steps": self._steps}
        critic = {} if self._critic is None else self._critic.save()
        origin = {ORIGIN_FILE: self._origin} if self._origin else {}
        return {**self.weights(), OPTIMIZER_FILE: _dump(optimizer), RANDOM_FILE: random_state(), **critic, **origin}

    def restore(self, files: Mapping[str, bytes]) -> None:
        """Take up what `save` returned.

        Raises:
            ValueError: when the weights are those of another model.
            RunFailed: they are adapters over other weights than this backend's, or the reference was another.
            KeyError: when a file is missing.
        """
        if self._origin and files.get(ORIGIN_FILE, self._origin) != self._origin:
            raise RunFailed(
                "the run began with other weights than are there now, and goes on needing them (as the base of"
                " learner.lora, or the reference of learner.algorithm.kl): what its supervised stages depend on has"
                " changed. Undo that, or name the old weights with model.path, model.tiny_llama=null and sft=null"
            )
        kept, random = _undump(files[OPTIMIZER_FILE]), files[RANDOM_FILE]
        if self._adapters is not None:
            self._adapters.take_up(files)
        else:
            load_weight_file(self.model, files[WEIGHT_FILE])
        self._optimizer.load_state_dict(kept["optimizer"])
        as_configured(self._optimizer, self._config)
        self._steps = kept["steps"]
        if self._critic is not None:
            self._critic.restore(files)
        set_random_state(random)

    def _hash_of_origin(self) -> bytes:
        tensors = weight_file(self.model) if self._adapters is None else tensor_file(self._adapters.base())
        return hashlib.sha256(tensors).hexdigest().encode()

    def _new_critic(self) -> Critic | None:
        """That of the algorithm, where it has one."""
        algorithm = self._config.algorithm
        if not isinstance(algorithm, PpoConfig):
            return None
        return Critic(algorithm.critic, self._config, self.model, self._token_logprobs)

    def _step_critic(
        self, critic: Critic, micros: Sequence[MicroBatch | PackedBatch], states: int, batch: Sequence[Sample]
    ) -> None:
        try:
            critic.step(micros, states)
        except ArithmeticError as error:
            raise ArithmeticError(f"{self._where()}: {error}; episodes {episode_names(batch)}") from error

    @property
    def _before_policy(self) -> int:
        """Learner steps in which only a critic learned: the policy's schedule begins after them."""
        algorithm = self._config.algorithm
        return algorithm.critic.warmup if isinstance(algorithm, PpoConfig) else 0

    def _forget_gradients(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        if self._critic is not None:
            self._critic.zero_grad()

    def _frozen(self) -> TokenLogprobs:
        """The weights that the run begins with, for good: a resume builds the backend from the same model. Below
        adapters they are there anyway."""
        if self._adapters is not None:
            return TokenLogprobs(self.model, packed=True, dtype=self._dtype, within=self._adapters.disabled)
        return TokenLogprobs(copy.deepcopy(self.model).requires_grad_(False), packed=True, dtype=self._dtype)

    def _microbatches(self, batch: Sequence[Sample]) -> Sequence[MicroBatch] | Sequence[PackedBatch]:
        """Packed, or padded where the model cannot compute several samples in one row."""
        if self._token_logprobs.why_padded:
            return [on_device(micro, self._device) for micro in pack(batch, self._config.microbatch_tokens)]
        packed = pack_tokens(batch, self._config.microbatch_tokens, self._config.share_prefixes)
        return [on_device(micro, self._device) for micro in packed]

    @property
    def why_padded(self) -> str:
        """Why this model's samples are padded; empty where they are packed."""
        return self._token_logprobs.why_padded

    def _where(self) -> str:
        return f"learner step {self._steps + 1}"


def _dump(state: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def _undump(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True)
