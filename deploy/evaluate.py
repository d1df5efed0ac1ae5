"""Evaluating on demand: a version of a stored run, or a model folder, on the evaluation tasks of a recipe.

`prepare` says what is evaluated and finds every mistake that can be found before anything is played; `evaluate` plays
in this process, through the worker and engine that training uses, and leaves episodes, rewards and the evaluation in a
run root: the run's own, or a fresh one for a model that is no run's. An evaluation that does not come to its end is
not stored. Tasks are those at positions 0 to N - 1 of the dev or hidden split, so that every evaluation of a recipe
under one seed plays the same ones, and none of those that training plays (case V2).
"""

import asyncio
import contextlib
import functools
import json
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.actors.environments.registry import environment_kind
from headrace.actors.rendering import load_renderer
from headrace.actors.worlds import Worlds
from headrace.deploy.checks import check_model
from headrace.deploy.context import POLICY_ID, RunContext
from headrace.deploy.engines import build_engine
from headrace.deploy.model_folder import resolve_model_folder
from headrace.deploy.source_digest import code_digest
from headrace.deploy.stored_version import open_version
from headrace.deploy.wiring import assemble_worker
from headrace.platform.config import RunConfig
from headrace.platform.config.load import config_from_text, dump_yaml, load_recipe
from headrace.platform.config.model import ModelConfig
from headrace.platform.errors import ConfigError
from headrace.platform.evaluation.record import evaluation_of
from headrace.platform.hashing import digest_value
from headrace.platform.ledger.memory import MemoryLedger
from headrace.platform.records.evaluation import EpisodeOutcome, Evaluation
from headrace.platform.records.versions import VersionManifest, VersionRef
from headrace.platform.store.evaluations import Claim, EvaluationStore
from headrace.platform.store.files import open_url
from headrace.platform.store.run_root import RunRoot

if TYPE_CHECKING:
    from headrace.serving.torch_engine import TorchEngine

_BEAT_S = 10.0
# Workers name their files; these numbers are never those of a run's own workers.
_FIRST_WORKER = 1_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationRequest:
    """What a person asks for. `name` is a run or a model folder; what is None or empty is as the recipe has it.
    `overrides` are KEY=VALUE, for the recipe."""

    name: str
    version: str = ""
    recipe: str = ""
    split: str = ""
    tasks: int | None = None
    samples: int | None = None
    seed: int | None = None
    temperature: float | None = None
    overrides: tuple[str, ...] = ()
    runs_dir: str = "runs"


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """What is evaluated, on what. `root` is None where a fresh one is to be made in `runs_dir`; `version` is None for a
    folder. `tasks` is how many there are to play, at most as many as the recipe asks for."""

    config: RunConfig
    tasks: int
    root: RunRoot | None
    runs_dir: str
    model: str
    version: int | None
    manifest: VersionManifest
    folder: Path


async def prepare(request: EvaluationRequest, recipes_dir: Path) -> Subject:
    """The subject of a request, everything checked.

    Raises:
        ConfigError: the request or the recipe is wrong, or the model's files cannot be used.
        NotFound: there is no such run, version, recipe or environment.
        RegistryError: the version's files are torn or altered.
    """
    if request.split not in ("", "dev", "hidden"):
        raise ConfigError(f"--split {request.split}: evaluation plays dev or hidden, never the tasks of training (V2)")
    _check_given_once(request)
    folder = _model_folder(request.name)
    if folder is None:
        return await _of_run(request, recipes_dir)
    return _of_folder(request, folder, recipes_dir)


def evaluation_digests(config: RunConfig, renderer_digest: str) -> dict[str, str]:
    """What besides weights, tasks and seeds decides the result of an evaluation."""
    environments = config.environments
    return {
        "recipe": digest_value([environment.model_dump(mode="json") for environment in environments]),
        "environments": digest_value([environment_kind(environment.name).digest for environment in environments]),
        "code": code_digest("platform", "actors", "serving"),
        "renderer": renderer_digest,
    }


async def evaluate(subject: Subject, note: Callable[[str], None]) -> tuple[Evaluation, RunRoot]:
    """Play the subject's evaluation tasks and store what came of it; `note` is told how it goes.

    Returns:
        The evaluation, and the root that it is stored in.
    """
    settings = subject.config.eval
    with _root_of(subject) as root:
        store = EvaluationStore(root.url)
        claim = store.claim(subject.version, settings.split, settings.samples)
        if subject.tasks < settings.tasks:
            note(f"eval.tasks is {settings.tasks}, but the {settings.split} split has fewer: no task is played as two")
        each = "1 episode" if settings.samples == 1 else f"{settings.samples} episodes"
        note(f"{subject.tasks} tasks of the {settings.split} split, {each} each")
        evaluation = evaluation_of(
            await _play(subject, root, claim, note),
            name=claim.name,
            run=root.name,
            model=subject.model,
            version=subject.version,
            split=settings.split,
            tasks=subject.tasks,
            samples=settings.samples,
            created_at_s=time.time(),
            digests=evaluation_digests(subject.config, load_renderer(subject.folder).digest),
        )
        store.write(evaluation)
    return evaluation, root


# --- what is evaluated ------------------------------------------------------------------------------------------------


def _model_folder(name: str) -> Path | None:
    """The folder that `name` is, None for a run's name or its root."""
    folder = Path(name).expanduser()
    return folder if folder.is_dir() and not (folder / "config.yaml").is_file() else None


def _of_folder(request: EvaluationRequest, folder: Path, recipes_dir: Path) -> Subject:
    if request.version:
        raise ConfigError(f"--version belongs to a run; {folder} is a model folder")
    if not request.recipe:
        raise ConfigError(
            f"{folder} is a model folder; say on what to evaluate it: --recipe NAME, YAML or ./file.py:Name"
        )
    recipe = functools.partial(load_recipe, request.recipe, recipes_dir=recipes_dir)
    config = _configured(request, recipe, (_model(str(folder.resolve())), "sft=null"))
    tasks = _tasks_to_play(config)
    check_model(config)
    ready = resolve_model_folder(config.model)
    manifest = VersionManifest(
        ref=VersionRef(POLICY_ID, 0),
        parent=None,
        parent_hash="",
        fence=0,
        kind="full",
        content_hash="",
        batches=0,
        path=str(ready),
    )
    return Subject(
        config=config,
        tasks=tasks,
        root=None,
        runs_dir=request.runs_dir,
        model=str(folder.resolve()),
        version=None,
        manifest=manifest,
        folder=ready,
    )


async def _of_run(request: EvaluationRequest, recipes_dir: Path) -> Subject:
    """On the run's own worlds, or on others: then the episodes belong into a root with that recipe."""
    root = RunRoot.find(request.runs_dir, request.name)
    own = functools.partial(config_from_text, root.read_config(), name=f"{root.name}/config.yaml")
    recipe = functools.partial(load_recipe, request.recipe, recipes_dir=recipes_dir) if request.recipe else own
    config = _configured(request, recipe, (_model(root.url), "sft=null") if request.recipe else ())
    tasks = _tasks_to_play(config)
    manifest, folder = await open_version(root, request.version or "latest")
    is_elsewhere = bool(request.recipe) or _worlds(config) != _worlds(own(overrides=[]))
    if is_elsewhere:
        model = ModelConfig(path=str(folder.resolve()))
        config = config.model_copy(update={"model": model, "sft": None})
    return Subject(
        config=config,
        tasks=tasks,
        root=None if is_elsewhere else root,
        runs_dir=request.runs_dir,
        model=root.name,
        version=manifest.ref.number,
        manifest=manifest,
        folder=folder,
    )


def _tasks_to_play(config: RunConfig) -> int:
    """How many tasks there are for the evaluation: no task is played twice where they are fewer than asked for.

    Raises:
        ConfigError: environments or tasks are wrong.
        NotFound: an environment is not registered.
    """
    worlds = Worlds(config.environments, config.eval.split, config.seed, config.curriculum)
    return len(worlds.distinct(range(config.eval.tasks)))


def _worlds(config: RunConfig) -> list[dict[str, Any]]:
    """What decides which worlds and tasks there are, and thereby whether a replay finds its world again."""
    return [each.model_dump(include={"name", "alias", "args", "tasks", "scorer"}) for each in config.environments]


def _check_given_once(request: EvaluationRequest) -> None:
    """Refuse keys that cannot be set here, or are set by an option as well. Raises ConfigError."""
    options = {
        "eval.split": request.split or None,
        "eval.tasks": request.tasks,
        "eval.samples": request.samples,
        "seed": request.seed,
    }
    for override in request.overrides:
        key = override.partition("=")[0].strip()
        option = key.rpartition(".")[2]
        if key.split(".")[0] == "model":
            raise ConfigError(f"{key}: the model is what is evaluated, {request.name}; leave it out")
        if key == "runs_dir":
            raise ConfigError("runs_dir: give --runs-dir, which also says where runs are looked for")
        is_temperature = key.startswith("environments.") and key.endswith(".sampling.temperature")
        given = request.temperature if is_temperature else options.get(key)
        if given is not None:
            raise ConfigError(f"{override} and --{option} {given}: give one of them")


def _model(path: str) -> str:
    return f"model={json.dumps({'path': path})}"


def _configured(request: EvaluationRequest, recipe: Callable[..., RunConfig], changes: Sequence[str] = ()) -> RunConfig:
    """The recipe, which takes `overrides`, as the request changes it."""
    wanted = {
        "eval.split": request.split or None,
        "eval.tasks": request.tasks,
        "eval.samples": request.samples,
        "seed": request.seed,
    }
    overrides = [*changes, *request.overrides]
    overrides += [f"{key}={value}" for key, value in wanted.items() if value is not None]
    config = recipe(overrides=overrides)
    if request.temperature is not None:
        for index in range(len(config.environments)):
            overrides.append(f"environments.{index}.sampling.temperature={request.temperature}")
        config = recipe(overrides=overrides)
    return config


@contextlib.contextmanager
def _root_of(subject: Subject) -> Iterator[RunRoot]:
    """The root to store in. A fresh one goes again when nothing came of it."""
    if subject.root is not None:
        yield subject.root
        return
    name = f"eval-{subject.config.name}-{secrets.token_hex(3)}"
    root = RunRoot.create(subject.runs_dir, name, dump_yaml(subject.config))
    try:
        yield root
    except BaseException:
        fs, path = open_url(root.url)
        fs.rm(path, recursive=True)
        raise


# --- how it is played -------------------------------------------------------------------------------------------------


async def _play(subject: Subject, root: RunRoot, claim: Claim, note: Callable[[str], None]) -> list[EpisodeOutcome]:
    """Every episode of the evaluation, with an engine and a worker in this process."""
    config, settings = subject.config, subject.config.eval
    context = RunContext(run=root.name, root=root.url, config=config)
    ledger = MemoryLedger(context.run, context.limits, time.time)
    number = subject.manifest.ref.number
    engine = build_engine(config, subject.folder, "evaluation", inline=True)
    try:
        await engine.load(subject.manifest, str(subject.folder))
        worker = assemble_worker(context, _FIRST_WORKER + claim.number, subject.folder, engine, lambda: number, ledger)
        telling = asyncio.create_task(_tell(engine, note))
        try:
            return await worker.evaluate(number, settings.split, range(settings.tasks), claim.index, settings.samples)
        finally:
            telling.cancel()
            await worker.close()
    finally:
        await engine.close()
        await ledger.close()


async def _tell(engine: "TorchEngine", note: Callable[[str], None]) -> None:
    """A sign of life now and then: on a CPU an evaluation can take long."""
    while True:
        await asyncio.sleep(_BEAT_S)
        stats = engine.stats()
        note(f"{stats.sampled_tokens} tokens sampled, {stats.running + stats.waiting} requests in the engine")
