"""TRL's own trainers for tests: given played episodes, the loss and gradients that TRL makes of them.

TRL is called, never rewritten: `GRPOTrainer` and `RLOOTrainer` are built as a user builds them, get the episodes
through `rollout_func` or in place of what they would generate, score and compare them themselves, and compute their own
loss through their own padded forward pass.
"""

import contextlib
import importlib
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from headrace.actors.environments.lookup.vocabulary import build_tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class Played:
    """One episode: `prompt`, then `spans` of tokens, each sampled by the policy or not, one logprob for each token."""

    group: int
    prompt: tuple[int, ...]
    spans: tuple[tuple[bool, tuple[int, ...], tuple[float, ...]], ...]
    reward: float

    @property
    def completion(self) -> list[int]:
        return [token for _, tokens, _ in self.spans for token in tokens]

    @property
    def mask(self) -> list[int]:
        return [int(sampled) for sampled, tokens, _ in self.spans for _ in tokens]

    @property
    def logprobs(self) -> list[float]:
        return [value for _, _, values in self.spans for value in values]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """TRL's own warnings, of what is experimental, deprecated or not supported there."""
    with warnings.catch_warnings(action="ignore"):
        yield


def import_trl() -> ModuleType:
    """TRL as where no vLLM is installed, which it would import whole, twice as long, and warn about its version."""
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    with quiet():
        importlib.import_module("trl.import_utils").is_vllm_available = lambda **_: False
        trl = importlib.import_module("trl")

        # Looked up now, while nothing is said about it: TRL imports its parts on first use.
        for name in ("GRPOConfig", "GRPOTrainer", "RLOOConfig", "RLOOTrainer"):
            getattr(trl, name)
    return trl


def grpo_trainer(model: nn.Module, played: Sequence[Played], folder: str, **options: object) -> object:
    """A `GRPOTrainer` that plays `played` whenever it is asked for completions."""
    trl = import_trl()

    def rollout(prompts: Sequence[str], trainer: object) -> dict[str, list]:
        return {
            "prompt_ids": [list(one.prompt) for one in played],
            "completion_ids": [one.completion for one in played],
            "logprobs": [one.logprobs for one in played],
            "env_mask": [one.mask for one in played],
        }

    with quiet():
        config = trl.GRPOConfig(output_dir=folder, **_common(played), **options)
        trainer = trl.GRPOTrainer(**_parts(model, played), args=config, rollout_func=rollout)
    return _ready(trainer)


def rloo_trainer(model: nn.Module, played: Sequence[Played], folder: str, **options: object) -> object:
    """An `RLOOTrainer` whose model has generated `played`. It knows no tokens of others within a completion."""
    trl = import_trl()
    with quiet():
        config = trl.RLOOConfig(output_dir=folder, **_common(played), **options)
        trainer = trl.RLOOTrainer(**_parts(model, played), args=config)
    trainer._tokenize_prompts = lambda prompts: ([list(one.prompt) for one in played], None, {})
    trainer._generate_single_turn = lambda prompt_ids, images, fields: [one.completion for one in played]
    return _ready(trainer)


def scored_inputs(trainer: object, played: Sequence[Played]) -> dict[str, Tensor]:
    """What the trainer's loss gets: padded tokens, masks, and advantages as the trainer computes them."""
    with quiet():
        return trainer._generate_and_score_completions([{"prompt": "find k00"} for _ in played])


def padded(trainer: object, played: Sequence[Played]) -> Tensor:
    """The episodes' behaviour logprobs as TRL pads completions: f32[B, T]."""
    width = max(len(one.completion) for one in played)
    table = torch.zeros(len(played), width)
    for b, one in enumerate(played):
        table[b, : len(one.logprobs)] = torch.tensor(one.logprobs)
    return table


def loss_and_gradients(trainer: object, inputs: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    """TRL's loss of `inputs`, and its gradient by parameter."""
    model = trainer.model
    model.zero_grad(set_to_none=True)
    with quiet():
        loss = trainer.compute_loss(model, inputs)
        loss.backward()
    return float(loss.detach()), {name: one.grad.clone() for name, one in model.named_parameters()}


def _common(played: Sequence[Played]) -> dict[str, object]:
    return {
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": [],
        "disable_tqdm": True,
        "per_device_train_batch_size": len(played),
        "num_generations": len(played) // len({one.group for one in played}),
    }


def _parts(model: nn.Module, played: Sequence[Played]) -> dict[str, object]:
    from datasets import Dataset

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=build_tokenizer(), eos_token="<end>", pad_token="<unk>")
    return {
        "model": model,
        "reward_funcs": lambda completions, **_: [one.reward for one in played],
        "train_dataset": Dataset.from_list([{"prompt": "find k00"}] * len(played)),
        "processing_class": tokenizer,
    }


def _ready(trainer: object) -> object:
    """As it is in the middle of `train`, on the CPU."""
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    return trainer
