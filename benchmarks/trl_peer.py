"""TRL's GRPO trainer as a peer: built as a user builds it, its own padding, forward pass, loss and generation.

Owns what both benchmarks against it need: the import, a trainer on the CPU in fp32, and the microbatches that it makes
of episodes played elsewhere. `trimmed` microbatches are kinder than TRL, which pads a whole generation batch to its
longest episode, shuffles it, then cuts it up.
"""

import importlib
import os
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from headrace.actors.environments.lookup.vocabulary import build_tokenizer
from headrace.platform.config import LearnerConfig
from headrace.trainer.samples import Sample

Batch = dict[str, Tensor]


def load() -> ModuleType | None:
    """TRL, or None where it is not installed. As where there is no vLLM, which it would only import here."""
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    with warnings.catch_warnings(action="ignore"):
        try:
            importlib.import_module("trl.import_utils").is_vllm_available = lambda **_: False  # type: ignore[attr-defined]
            trl = importlib.import_module("trl")
            trl.GRPOTrainer, trl.GRPOConfig  # noqa: B018  # TRL imports its parts when they are first asked for
        except ImportError:
            return None
    return trl


def grpo_trainer(
    model: Any, tokenizer: Any, folder: str, rewards: Callable[..., Any], prompts: Sequence[Any], **options: Any
) -> Any:
    """A `GRPOTrainer` in fp32 on the CPU; `options` are of its configuration, or parts that it takes beside it."""
    trl = load()
    if trl is None:
        raise ImportError("trl is not installed")
    from datasets import Dataset

    parts = {name: options.pop(name) for name in ("rollout_func", "callbacks", "optimizers") if name in options}
    common = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "report_to": [], "disable_tqdm": True}
    with warnings.catch_warnings(action="ignore"):
        return trl.GRPOTrainer(
            model=model,
            reward_funcs=rewards,
            args=trl.GRPOConfig(output_dir=folder, **{**common, **options}),
            train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
            processing_class=tokenizer,
            **parts,
        )


class TrlStep:
    """An optimizer step with TRL's loss over `given`, whose groups follow one another; the optimizer is the product's.

    Args:
        model: trained in place.
        group: episodes per group, and per microbatch.
        longest: completion tokens.
        trimmed: see `microbatches`.
    """

    def __init__(self, model: Any, given: Sequence[Sample], group: int, longest: int, trimmed: bool) -> None:
        config = LearnerConfig()
        self.model = model
        self._folder = tempfile.TemporaryDirectory()
        count = len(given) // group
        self._trainer = grpo_trainer(
            model,
            PreTrainedTokenizerFast(tokenizer_object=build_tokenizer(), eos_token="<end>", pad_token="<unk>"),
            self._folder.name,
            lambda completions, **_: [0.0] * len(completions),
            [""] * len(given),
            per_device_train_batch_size=group,
            gradient_accumulation_steps=count,
            num_generations=group,
            max_completion_length=longest,
            epsilon=config.algorithm.clip_low,
            epsilon_high=config.algorithm.clip_high,
            loss_type="dapo",
        )
        self._trainer.current_gradient_accumulation_steps = count
        self._batches = microbatches(self._trainer, given, trimmed)
        self._clip = config.clip_grad
        self._optimizer = torch.optim.AdamW(
            model.parameters(), lr=config.lr, betas=config.betas, weight_decay=config.weight_decay
        )

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Rows and padded tokens per row of each microbatch."""
        return [
            (one["prompt_ids"].shape[0], one["prompt_ids"].shape[1] + one["completion_ids"].shape[1])
            for one in self._batches
        ]

    def __call__(self) -> None:
        """The step."""
        self.gradients()
        self._update()

    def small(self) -> None:
        """A step over two rows: it makes what stays."""
        first = {name: value[:2] if value.dim() else value for name, value in self._batches[0].items()}
        self._backward(_trimmed(first))
        self._update()

    def gradients(self) -> None:
        """Add those of all microbatches to the model's."""
        for batch in self._batches:
            self._backward(batch)

    def _backward(self, batch: Batch) -> None:
        self.model.train()
        self._trainer.compute_loss(self.model, batch).backward()

    def _update(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._clip)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)


def microbatches(trainer: Any, samples: Sequence[Sample], trimmed: bool) -> list[Batch]:
    """What TRL's loss gets of `samples`, a multiple of the trainer's batch size, each a prompt and what follows it."""
    rows = [_row(sample) for sample in samples]
    played = {
        "prompt_ids": [row["prompt"] for row in rows],
        "completion_ids": [row["completion"] for row in rows],
        "logprobs": [row["logprobs"] for row in rows],
        "env_mask": [row["mask"] for row in rows],
    }
    trainer.rollout_func = lambda prompts, _: played
    whole: Batch = trainer._generate_and_score_completions([{"prompt": ""} for _ in rows])
    whole["advantages"] = torch.tensor([row["advantage"] for row in rows])
    whole["old_per_token_logps"] = whole.pop("sampling_per_token_logps")
    utilities = importlib.import_module("trl.trainer.utils")
    count = len(rows) // trainer.args.per_device_train_batch_size
    if not trimmed:
        return list(utilities.split_tensor_dict(utilities.shuffle_sequence_dict(whole), count))
    return [_trimmed(batch) for batch in utilities.split_tensor_dict(whole, count)]


def _row(sample: Sample) -> Mapping[str, Any]:
    begin = int(sample.action_mask.argmax())
    return {
        "prompt": sample.token_ids[:begin].tolist(),
        "completion": sample.token_ids[begin:].tolist(),
        "logprobs": sample.behaviour_logprobs[begin:].tolist(),
        "mask": sample.loss_mask[begin:].tolist(),
        "advantage": float(sample.advantages[begin]),
    }


def _trimmed(batch: Batch) -> Batch:
    """Without columns that are padding in every row."""
    prompt = int(batch["prompt_mask"].sum(1).max())
    completion = int(batch["completion_mask"].sum(1).max())
    width = batch["completion_ids"].shape[1]
    found = {}
    for name, value in batch.items():
        if name.startswith("prompt_"):
            value = value[:, value.shape[1] - prompt :]
        elif value.dim() == 2 and value.shape[1] == width:
            value = value[:, :completion]
        found[name] = value
    return found
