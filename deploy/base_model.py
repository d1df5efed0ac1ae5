"""The model that reinforcement learning starts from: a given folder, or supervised stages run here and cached.

The cache key is a hash of everything that the result depends on: recipe, seed, data files, the user's own code, ours,
torch. A finished folder appears by rename, so what is there is whole; a second run starts where reinforcement learning
does. Where the traces of a stage come from is told in demonstrations/.
"""

import asyncio
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headrace.actors.demonstrations.chats import chat_texts, read_chats
from headrace.actors.demonstrations.loss import unknown_token
from headrace.actors.environments.registry import environment_kind
from headrace.actors.rendering import load_renderer
from headrace.deploy.checks import check_model
from headrace.deploy.demonstrations.inputs import file_digest, stage_inputs
from headrace.deploy.model_folder import model_fingerprint, resolve_model_folder
from headrace.deploy.new_folder import cached_folder, new_folder
from headrace.deploy.source_digest import code_digest
from headrace.platform.config import RunConfig, TinyLlamaConfig
from headrace.platform.errors import ConfigError
from headrace.platform.hashing import digest_value


@dataclass(frozen=True, slots=True)
class BaseModel:
    """A Hugging Face folder, whether it was found in the cache, and what the stages came to."""

    path: Path
    cached: bool
    stages: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class SftStep:
    """Progress of a stage; `success` is None between measurements. `SftProgress` for parts that load no torch."""

    stage: str
    step: int
    max_steps: int
    loss: float
    success: float | None


def cache_folder(config: RunConfig) -> Path:
    """Where this recipe's supervised stages are, or will be."""
    import torch

    sft = config.sft
    base = Path(sft.cache_dir) if sft and sft.cache_dir else Path.home() / ".cache" / "headrace"
    key = digest_value(
        {
            "model": config.model.model_dump(mode="json"),
            "files": model_fingerprint(config.model),
            "stages": [stage.model_dump(mode="json") for stage in sft.stages] if sft else [],
            "environments": [environment.model_dump(mode="json") for environment in config.environments],
            "seed": config.seed,
            "inputs": stage_inputs(config),
            "code": code_digest("actors", "serving", "trainer", "deploy/demonstrations"),
            "vocabularies": file_digest(Path(__file__).with_name("vocabulary.py")),
            "torch": str(torch.__version__),
        }
    )
    return base / "sft" / key[:24]


def prepare_base_model(
    config: RunConfig, on_progress: Callable[[SftStep], None], folder: Path | None = None
) -> BaseModel:
    """The folder to start from; runs the supervised stages unless their result is cached.

    Args:
        config: the recipe.
        on_progress: called after every optimizer step; what it raises ends the stages.
        folder: where to write instead of the cache, for `headrace sft --out`.

    Raises:
        ConfigError: the environment has no demonstrations, or no vocabulary for a tiny model, or the model's files
            cannot be used, or `folder` exists or cannot be made.
        RunFailed: a stage's gate was not reached, or `folder` appeared meanwhile.
    """
    if config.sft is None and config.model.tiny_llama is None:
        ready = resolve_model_folder(config.model)
        check_model(config)  # what has just been prepared was not there to be checked before
        return BaseModel(ready, cached=True)
    target = folder or cache_folder(config)
    if folder is None and (target / "stages.json").is_file():
        return BaseModel(target, cached=True, stages=tuple(json.loads((target / "stages.json").read_text())))
    with cached_folder(target) if folder is None else new_folder(target) as working:
        stages = _run_stages(config, working, on_progress)
        (working / "stages.json").write_text(json.dumps(stages))
    return BaseModel(target, cached=False, stages=tuple(stages))


def _run_stages(config: RunConfig, folder: Path, on_progress: Callable[[SftStep], None]) -> list[dict[str, Any]]:
    import torch
    import transformers

    from headrace.deploy.demonstrations.sources import stage_demonstrations
    from headrace.deploy.demonstrations.training import longest_trace, train_stage
    from headrace.deploy.measured_success import measured_success
    from headrace.trainer.model import save_folder

    # A bar per measurement would hide the run's own progress.
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model, tokenizer = _initial_model(config)
    save_folder(model, folder, tokenizer)
    renderer = load_renderer(folder)
    results: list[dict[str, Any]] = []
    for stage in config.sft.stages if config.sft else ():
        torch.set_num_threads(config.sft.threads if config.sft else 1)
        longest = longest_trace(model, stage.max_tokens)
        shown = stage_demonstrations(config, stage, renderer, longest, unknown_token(folder))

        def measure(tasks: int = stage.measure_tasks) -> float:
            save_folder(model, folder, tokenizer)
            return asyncio.run(measured_success(config, folder, tasks))

        results.append(train_stage(model, stage, shown, measure, lambda done: on_progress(SftStep(**asdict(done)))))
    save_folder(model, folder, tokenizer)
    return results


def _initial_model(config: RunConfig) -> tuple[Any, dict[str, bytes]]:
    """The model before any training, and its tokenizer files."""
    if config.model.tiny_llama is None:
        from headrace.trainer.model import load_folder
        from headrace.trainer.weights import tokenizer_files

        folder = resolve_model_folder(config.model)
        return load_folder(folder), tokenizer_files(folder)
    from tokenizers import Tokenizer

    from headrace.trainer.model import build_tiny_llama

    files = _tiny_vocabulary(config, config.model.tiny_llama)
    tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
    special = json.loads(files["tokenizer_config.json"])
    model = build_tiny_llama(
        config.model.tiny_llama,
        tokenizer.get_vocab_size(),
        config.seed,
        tokenizer.token_to_id(special["pad_token"]) or 0,
        tokenizer.token_to_id(special["eos_token"]) or 0,
    )
    return model, files


def _tiny_vocabulary(config: RunConfig, tiny: TinyLlamaConfig) -> dict[str, bytes]:
    """The tokenizer files of a tiny model: a general vocabulary, or the one that an environment brings."""
    if tiny.vocabulary in ("bytes", "trained"):
        from headrace.deploy.vocabulary import vocabulary_files

        data = [stage.data for stage in config.sft.stages if stage.data] if config.sft else []
        texts = [text for file in data for text in chat_texts(read_chats(file))] if tiny.vocabulary == "trained" else []
        return vocabulary_files(tiny.vocabulary, texts, tiny.vocabulary_size)
    bring = [kind.tokenizer_files for each in config.environments if (kind := environment_kind(each.name))]
    made = next((make for make in bring if make is not None), None)
    if made is None:
        names = ", ".join(repr(environment.name) for environment in config.environments)
        raise ConfigError(
            f"environment {names} brings no vocabulary {tiny.vocabulary!r} for model.tiny_llama; use vocabulary: bytes"
            " or trained, or set model.path"
        )
    return made()
