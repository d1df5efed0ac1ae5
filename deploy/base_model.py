"""The model that reinforcement learning starts from: a given folder, or supervised stages run here and cached.

The cache key is a hash of everything that the result depends on: recipe, seed, code, torch. A finished folder appears
by rename, so what is there is whole; a second run starts where reinforcement learning does.
"""

import asyncio
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headrace.actors.environments.registry import EnvironmentKind, environment_kind
from headrace.actors.rendering import load_renderer
from headrace.deploy.context import POLICY_ID
from headrace.deploy.source_digest import code_digest
from headrace.platform.config import RunConfig
from headrace.platform.errors import ConfigError, RunFailed
from headrace.platform.hashing import digest_value
from headrace.platform.records.versions import VersionManifest, VersionRef


@dataclass(frozen=True, slots=True)
class BaseModel:
    """A Hugging Face folder, whether it was found in the cache, and what the stages came to."""

    path: Path
    cached: bool
    stages: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class SftStep:
    """Progress of a stage; `success` is None between measurements."""

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
            "stages": [stage.model_dump(mode="json") for stage in sft.stages] if sft else [],
            "environments": [environment.model_dump(mode="json") for environment in config.environments],
            "seed": config.seed,
            "code": code_digest("actors", "serving", "trainer"),
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
        ConfigError: the environment has no demonstrations, or no vocabulary for a tiny model.
        RunFailed: a stage's gate was not reached.
    """
    if config.sft is None and config.model.path:
        return BaseModel(Path(config.model.path), cached=True)
    target = folder or cache_folder(config)
    if (target / "stages.json").is_file():
        return BaseModel(target, cached=True, stages=tuple(json.loads((target / "stages.json").read_text())))
    target.parent.mkdir(parents=True, exist_ok=True)
    working = Path(tempfile.mkdtemp(prefix=target.name, dir=target.parent))
    try:
        stages = _run_stages(config, working, on_progress)
        (working / "stages.json").write_text(json.dumps(stages))
        working.chmod(0o755)
        if not target.exists():
            working.rename(target)
    finally:
        shutil.rmtree(working, ignore_errors=True)
    return BaseModel(target, cached=False, stages=tuple(stages))


def _run_stages(config: RunConfig, folder: Path, on_progress: Callable[[SftStep], None]) -> list[dict[str, Any]]:
    import numpy as np
    import torch
    import transformers

    from headrace.trainer.model import save_folder
    from headrace.trainer.sft import SftProgress, SftTrace, run_stage

    # A bar per measurement would hide the run's own progress.
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    kind = environment_kind(config.environments[0].name)
    model, tokenizer = _initial_model(config, kind)
    save_folder(model, folder, tokenizer)
    renderer = load_renderer(folder)
    results: list[dict[str, Any]] = []
    for stage in config.sft.stages if config.sft else ():
        torch.set_num_threads(config.sft.threads if config.sft else 1)
        if kind.demonstrations is None:
            raise ConfigError(
                f"environment {config.environments[0].name!r} has no demonstrations to imitate; drop `sft`"
            )
        pairs = kind.demonstrations(renderer, config.seed, stage.guess_share, config.environments[0].args)
        traces: Iterator[SftTrace] = (
            SftTrace(np.array(ids, dtype=np.int32), np.array(mask, dtype=np.uint8)) for ids, mask in pairs
        )

        def measure(tasks: int = stage.measure_tasks) -> float:
            save_folder(model, folder, tokenizer)
            return asyncio.run(_measured_success(config, folder, tasks))

        def report(progress: SftProgress) -> None:
            on_progress(SftStep(progress.stage, progress.step, progress.max_steps, progress.loss, progress.success))

        began = time.monotonic()
        results.append(
            {**asdict(run_stage(model, stage, traces, measure, report)), "seconds": time.monotonic() - began}
        )
    save_folder(model, folder, tokenizer)
    return results


def _initial_model(config: RunConfig, kind: EnvironmentKind) -> tuple[Any, dict[str, bytes]]:
    """The model before any training, and its tokenizer files."""
    if config.model.tiny_llama is None:
        from headrace.trainer.model import load_folder
        from headrace.trainer.weights import tokenizer_files

        return load_folder(Path(config.model.path)), tokenizer_files(Path(config.model.path))
    from tokenizers import Tokenizer

    from headrace.trainer.model import build_tiny_llama

    if kind.tokenizer_files is None:
        raise ConfigError(
            f"environment {config.environments[0].name!r} brings no vocabulary for model.tiny_llama; set model.path"
        )
    files = kind.tokenizer_files()
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


async def _measured_success(config: RunConfig, folder: Path, tasks: int) -> float:
    """Mean score of `tasks` episodes on the dev split, sampled by a real engine in this thread.

    Raises:
        RunFailed: none of them gave a valid reward; names the first fault.
    """
    from headrace.actors.episode import play_episode
    from headrace.actors.plan import EpisodePlan, PlayedEpisode
    from headrace.actors.sampling import sampling_params
    from headrace.actors.worlds import Worlds
    from headrace.deploy.wiring import build_engine
    from headrace.platform.records.ids import AttemptId
    from headrace.platform.records.status import Purpose

    ref = VersionRef(POLICY_ID, 0)
    manifest = VersionManifest(
        ref=ref, parent=None, parent_hash="", fence=0, kind="full", content_hash="", batches=0, path=str(folder)
    )
    engine = build_engine(config, folder, "sft", inline=True)
    await engine.load(manifest, str(folder))
    renderer, worlds = load_renderer(folder), Worlds(config.environments, "dev", config.seed)

    async def play(position: int) -> PlayedEpisode:
        setting = worlds.setting(position)
        plan = EpisodePlan(
            attempt_id=AttemptId("sft", position, 0, 0, Purpose.SFT),
            task=setting.task,
            seed=setting.seed,
            version=ref,
            sampling=sampling_params(setting.config, renderer),
            budgets=setting.config.budgets.budgets(),
        )
        environment = worlds.async_environment(setting.config)
        return await play_episode(plan, environment, renderer, engine)

    try:
        played = await asyncio.gather(*(play(position) for position in range(tasks)))
    finally:
        await engine.close()
    scores = [each.score for each in played if each.score is not None]
    if not scores:
        fault = next((each.episode.fault for each in played if each.episode.fault), "none was recorded")
        raise RunFailed(f"none of {tasks} episodes gave a valid reward to measure by; the first fault: {fault}")
    return sum(scores) / len(scores)
