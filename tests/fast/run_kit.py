"""Small whole runs in this process: the shipped recipe `lookup`, its trained base model, a few learner steps."""

import asyncio
import io
from pathlib import Path
from typing import Any

from headrace.deploy.progress import PlainProgress, RunState
from headrace.deploy.runtime_inprocess import InprocessRuntime
from headrace.deploy.train import create_run, train
from headrace.platform.config import RunConfig
from headrace.platform.config.load import load_recipe
from headrace.platform.records.episode import Episode
from headrace.platform.store.episodes import EpisodeStore
from headrace.platform.store.run_root import RunRoot

RECIPES = Path(__file__).resolve().parents[2] / "deploy" / "recipes"
SMALL = (
    "model.tiny_llama=null",
    "sft=null",
    "runtime.kind=inprocess",
    "learner.steps=3",
    "learner.batch_groups=4",
    "eval.tasks=16",
)


def overrides(model: Path, runs_dir: Path, *changes: str) -> list[str]:
    """What makes `lookup` small, on top of a model that is there already."""
    return [f"model.path={model}", f"runs_dir={runs_dir}", *SMALL, *changes]


def small_config(model: Path, runs_dir: Path, *changes: str) -> RunConfig:
    return load_recipe("lookup", overrides(model, runs_dir, *changes), RECIPES)


def run_inprocess(config: RunConfig) -> tuple[dict[str, Any], RunRoot]:
    """Carry a run through; its summary and its root."""
    context, root = create_run(config)
    state = RunState(context.run)
    progress = PlainProgress(state, io.StringIO())
    return asyncio.run(train(context, root, InprocessRuntime(context), state, progress)), root


def only_root(runs_dir: Path) -> RunRoot:
    """The one run that a command left in `runs_dir`."""
    (folder,) = runs_dir.iterdir()
    return RunRoot(str(folder))


def stored(root: RunRoot) -> list[Episode]:
    """Every stored episode, in the order of their ids, which is the order of dispatch."""
    return sorted(EpisodeStore(root.url).iterate(), key=lambda episode: (episode.purpose, episode.attempt_id))
