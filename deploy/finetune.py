"""Supervised fine-tuning of a model folder on data alone: chats in a file, or a run's stored episodes.

No environment is played and no run root is made. The result is a Hugging Face folder in fp32 that appears whole; the
report lies in it as `stages.json`, as in every folder that supervised stages made.
"""

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headrace.actors.demonstrations.loss import unknown_token
from headrace.actors.rendering import load_renderer
from headrace.deploy.base_model import SftStep
from headrace.deploy.demonstrations.gathering import Demonstrations
from headrace.deploy.new_folder import new_folder
from headrace.platform.config import SftStageConfig
from headrace.platform.contracts import Renderer
from headrace.platform.store.run_root import RunRoot

MOST_WARMUP = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class FinetuneSettings:
    """How to train. `steps` wins over `epochs`, from which it follows otherwise."""

    steps: int | None = None
    epochs: float = 1.0
    lr: float = 2e-5
    batch: int = 16
    max_tokens: int = 2048
    seed: int = 0
    threads: int = 1


def finetune(
    data: Path | RunRoot,
    model_dir: Path,
    out: Path,
    settings: FinetuneSettings,
    on_progress: Callable[[SftStep], None],
    filter_text: str = "",
) -> dict[str, Any]:
    """Train the model in `model_dir` on `data` and write it to `out`; the report.

    Args:
        data: a `.jsonl` or `.parquet` file of chats, or the root of a run whose episodes `filter_text` chooses.
        model_dir: a folder that every loader takes (see model_folder.py).
        out: must not exist yet.
        settings: how to train.
        on_progress: called after every step; what it raises ends the training and leaves nothing.
        filter_text: see `EpisodeFilter`; only for a run.

    Raises:
        ConfigError: `out` exists or cannot be made, or the data cannot be read, cannot be expressed by the model, or
            leaves nothing.
        RunFailed: `out` appeared meanwhile; says where the result is.
    """
    import torch
    import transformers

    from headrace.deploy.demonstrations.training import longest_trace, train_stage
    from headrace.trainer.model import load_folder, save_folder
    from headrace.trainer.weights import tokenizer_files

    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.set_num_threads(settings.threads)
    with new_folder(out) as working:
        renderer, model = load_renderer(model_dir), load_folder(model_dir)
        shown = _shown(data, filter_text, renderer, longest_trace(model, settings.max_tokens), settings.seed, model_dir)
        stage = _stage(data, filter_text, settings, shown.size or 0)
        report = train_stage(model, stage, shown, None, lambda done: on_progress(SftStep(**asdict(done))))
        save_folder(model, working, tokenizer_files(model_dir))
        (working / "stages.json").write_text(json.dumps([report]))
    return report


def _shown(
    data: Path | RunRoot, filter_text: str, renderer: Renderer, max_tokens: int, seed: int, model_dir: Path
) -> Demonstrations:
    from headrace.deploy.demonstrations.sources import chat_demonstrations, episode_demonstrations

    if isinstance(data, RunRoot):
        return episode_demonstrations(data, filter_text, renderer, max_tokens, seed)
    return chat_demonstrations(data, renderer, max_tokens, seed, unknown_token(model_dir))


def _stage(data: Path | RunRoot, filter_text: str, settings: FinetuneSettings, size: int) -> SftStageConfig:
    steps = settings.steps or max(1, math.ceil(settings.epochs * size / settings.batch))
    source = {"episodes": data.url, "filter": filter_text} if isinstance(data, RunRoot) else {"data": str(data)}
    return SftStageConfig(
        name=data.name if isinstance(data, RunRoot) else data.stem,
        max_steps=steps,
        lr=settings.lr,
        batch=min(settings.batch, size),
        warmup=min(MOST_WARMUP, steps // 10),
        max_tokens=settings.max_tokens,
        **source,
    )
