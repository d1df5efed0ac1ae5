"""The learner in one process: plain PyTorch, fp32, AdamW.

Owns the weights, the optimizer and their place in the schedule. One `step` is one optimizer step over all samples,
however many microbatches it takes: the loss is a mean over the step's loss tokens, so the gradient does not depend on
how samples were packed or in which order they came (case V6). On a CPU with a fixed number of threads the same
samples give the same loss to the last digit. A step whose loss or gradient is not finite changes nothing.
"""

import io
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.platform.config.learner import LearnerConfig
from headrace.platform.contracts import Algorithm
from headrace.platform.records.arrays import F32
from headrace.trainer.aggregation import step_sequences, with_columns
from headrace.trainer.batch import LossOutput, LossTokens, MicroBatch, pack, step_tokens
from headrace.trainer.forward import TokenLogprobs
from headrace.trainer.model import load_folder
from headrace.trainer.packing import PackedBatch, pack_tokens
from headrace.trainer.samples import Sample
from headrace.trainer.step_statistics import StatisticsBuilder, StepStatistics
from headrace.trainer.weights import WEIGHT_FILE, constant_files, load_weight_file, tokenizer_files, weight_file

_log = logging.getLogger(__name__)
OPTIMIZER_FILE = "optimizer.pt"
RANDOM_FILE = "random.pt"


class TorchBackend:
    """See the module.

    Args:
        model: a Hugging Face folder, or a causal language model already built (whose weights are then trained in
            place).
        config: optimizer and microbatch size. `config.threads` is set for the whole process.
        tokenizer: tokenizer files by name, for a model that came without a folder.
    """

    def __init__(self, model: str | Path | Any, config: LearnerConfig, tokenizer: Mapping[str, bytes] = {}) -> None:
        torch.set_num_threads(config.threads)
        if isinstance(model, str | Path):
            tokenizer = tokenizer_files(Path(model))
            model = load_folder(model)
        self.model: Any = model.float()
        self._config = config
        self._constant = constant_files(self.model, tokenizer)
        self._token_logprobs = TokenLogprobs(self.model, packed=True)
        if self.why_padded:
            _log.info("samples are padded, not packed: %s", self.why_padded)
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=config.lr, betas=config.betas, weight_decay=config.weight_decay
        )
        self._steps = 0

    def step(self, batch: Sequence[Sample], algorithm: Algorithm) -> StepStatistics:
        """One optimizer step over `batch`.

        Raises:
            ArithmeticError: when the loss or its gradient is not finite; names the episodes. Nothing has changed.
            ValueError: when no token of `batch` enters the loss.
        """
        total = step_tokens(batch)
        if total == 0:
            raise ValueError("no token of this batch enters the loss")
        self._optimizer.zero_grad(set_to_none=True)
        sequences = step_sequences(batch)
        statistics = StatisticsBuilder()
        try:
            for micro in self._microbatches(batch):
                if not bool(micro.loss_mask.any()):
                    continue
                tokens = with_columns(micro.loss_tokens(total), step_sequences=sequences)
                logprobs = self._token_logprobs.of(micro, micro.loss_mask)
                output: LossOutput = algorithm.loss(logprobs, tokens)
                self._check_finite(output, logprobs, tokens)
                output.loss.backward()  # type: ignore[no-untyped-call]
                statistics.add(output, tokens, logprobs)
            grad_norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._config.clip_grad))
            if not np.isfinite(grad_norm):
                raise ArithmeticError(f"{self._where()}: the gradient is not finite; episodes {_names(batch)}")
        except ArithmeticError:
            self._optimizer.zero_grad(set_to_none=True)
            raise
        lr = self._config.lr * min(1.0, (self._steps + 1) / max(self._config.warmup, 1))
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._steps += 1
        return statistics.build(grad_norm, lr)

    @torch.no_grad()
    def logprobs(self, batch: Sequence[Sample]) -> list[F32]:
        """Logprobs f32[T] of each sample's tokens, in the order of `batch`; 0 for token 0, which nothing predicts."""
        found: dict[int, F32] = {}
        for micro in self._microbatches(batch):
            chosen = micro.predicted
            logprobs = torch.zeros(chosen.shape)
            logprobs[chosen] = self._token_logprobs.of(micro, chosen)
            for sample, row in zip(micro.rows, micro.by_sample(logprobs), strict=True):
                found[id(sample)] = row.numpy().copy()
        return [found[id(sample)] for sample in batch]

    def weights(self) -> dict[str, bytes]:
        """The files of a Hugging Face folder that holds the present weights; only the tensors are made anew."""
        return {**self._constant, WEIGHT_FILE: weight_file(self.model)}

    def save(self) -> dict[str, bytes]:
        """Weights, optimizer, position in the schedule, and torch's and NumPy's random states."""
        optimizer = {"optimizer": self._optimizer.state_dict(), "steps": self._steps}
        return {**self.weights(), OPTIMIZER_FILE: _dump(optimizer), RANDOM_FILE: _dump(_random_state())}

    def restore(self, files: Mapping[str, bytes]) -> None:
        """Take up what `save` returned.

        Raises:
            ValueError: when the weights are those of another model.
            KeyError: when a file is missing.
        """
        kept, random = _undump(files[OPTIMIZER_FILE]), _undump(files[RANDOM_FILE])
        load_weight_file(self.model, files[WEIGHT_FILE])
        self._optimizer.load_state_dict(kept["optimizer"])
        self._steps = kept["steps"]
        _set_random_state(random)

    def _microbatches(self, batch: Sequence[Sample]) -> Sequence[MicroBatch] | Sequence[PackedBatch]:
        """Packed, or padded where the model cannot compute several samples in one row."""
        if self._token_logprobs.why_padded:
            return pack(batch, self._config.microbatch_tokens)
        return pack_tokens(batch, self._config.microbatch_tokens, self._config.share_prefixes)

    @property
    def why_padded(self) -> str:
        """Why this model's samples are padded; empty where they are packed."""
        return self._token_logprobs.why_padded

    def _check_finite(self, output: LossOutput, logprobs: Tensor, tokens: LossTokens) -> None:
        if bool(torch.isfinite(output.loss)):
            return
        healthy_N = torch.isfinite(logprobs) & torch.isfinite(tokens.behaviour_logprobs)
        healthy_N &= torch.isfinite(tokens.advantages) & torch.isfinite(output.ratio)
        rows = sorted(set(tokens.row[~healthy_N].tolist())) or range(len(tokens.rows))
        raise ArithmeticError(
            f"{self._where()}: the loss is not finite; episodes {_names([tokens.rows[b] for b in rows])}"
        )

    def _where(self) -> str:
        return f"learner step {self._steps + 1}"


def _names(samples: Sequence[Sample]) -> str:
    return ", ".join(sorted({sample.episode_id for sample in samples}))


def _dump(state: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def _undump(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True)


def _random_state() -> dict[str, Any]:
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    numpy_state = [
        str(name),
        torch.from_numpy(np.asarray(keys, np.int64)),
        int(position),
        int(has_gauss),
        float(cached),
    ]
    return {"torch": torch.get_rng_state(), "numpy": numpy_state}


def _set_random_state(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
