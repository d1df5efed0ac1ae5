"""What can be known to be wrong before anything starts, beyond what the configuration knows of itself (case V4)."""

from importlib.util import find_spec

from fsspec.implementations.memory import MemoryFileSystem

from headrace.actors.scoring.registry import build_scorer
from headrace.actors.worlds import Worlds
from headrace.deploy.branch_checks import check_branch
from headrace.deploy.demonstrations.inputs import stage_inputs
from headrace.deploy.model_folder import check_model_files, ready_folder
from headrace.platform.config import PpoConfig, RunConfig
from headrace.platform.config.secret_references import resolve
from headrace.platform.errors import ConfigError, EngineError
from headrace.platform.observability.loggers import check_loggers
from headrace.platform.store.files import open_url


def check_config(config: RunConfig) -> None:
    """Refuse a recipe that cannot run here.

    Raises:
        ConfigError: it joins a cluster without a server for it, keeps its runs where its processes cannot meet, has
            wrong arguments for an environment, a scorer or a mounted tool, permissions for tools that there are not,
            tasks, a sandbox, or what a mounted tool or an approval needs, that cannot be had here, a logger that is not
            installed, or a model that cannot be used.
        NotFound: it names an environment that is not registered, or a run that is not there.
    """
    check_cluster(config)
    check_learner(config)
    check_branch(config)
    check_engine(config)
    check_runs_dir(config)
    check_loggers(config.loggers)
    worlds = Worlds(config.environments, "train", config.seed, config.curriculum)
    Worlds(config.environments, config.eval.split, config.seed, config.curriculum)
    if not config.runtime.ray_address:  # else the nodes say it when they begin: this one need not play
        worlds.open_resources()
    for environment in config.environments:
        if environment.scorer is not None:
            build_scorer(environment.scorer.kind, environment.scorer.args)
    stage_inputs(config)
    check_model(config)


def check_model(config: RunConfig) -> None:
    """Refuse a model whose files cannot be used, or whose architecture the engine cannot serve. Raises ConfigError."""
    if config.model.tiny_llama is not None:
        return
    check_model_files(config.model)
    if config.serving.engine == "vllm" and config.runtime.kind != "inprocess":
        return  # it knows more architectures, and says so itself when it loads the first version
    folder = ready_folder(config.model)
    if folder is None:
        return
    from headrace.serving.support import check_folder

    longest = max(config.environments, key=lambda environment: environment.budgets.max_tokens)
    tokens = longest.budgets.max_tokens
    try:
        check_folder(folder, tokens)
    except EngineError as error:
        raise ConfigError(
            f"the torch engine cannot serve this model: {error}. Choose another model, or, where positions are the"
            f" cause, set environments.{longest.known_as}.budgets.max_tokens (now {tokens}) to what the model has;"
            " serving.engine=vllm serves more architectures"
        ) from error


def check_cluster(config: RunConfig) -> None:
    """Refuse a joined cluster without a server that its nodes can reach. Raises ConfigError."""
    if config.runtime.ray_address and not config.queue.redis_url:
        raise ConfigError(
            "runtime.ray_address joins a cluster, whose nodes cannot reach an embedded server;"
            " set queue.redis_url to a server that they all reach"
        )


def check_engine(config: RunConfig) -> None:
    """Refuse an engine that is not installed. Raises ConfigError. On a cluster each node has its own packages."""
    if config.serving.engine == "vllm" and not config.runtime.ray_address:
        from headrace.serving.vllm_process import check_installed

        check_installed()


def check_learner(config: RunConfig) -> None:
    """Refuse a backend that is not there, or asked for what it has not. Raises ConfigError."""
    ranks, backend = config.learner.ranks, config.learner.backend
    if ranks > 1 and backend == "torch":
        raise ConfigError(
            f"learner.ranks={ranks}, and learner.backend=torch has one; leave learner.ranks at 1, or use"
            " learner.backend=deepspeed"
        )
    if config.learner.device == "cuda" and not config.runtime.ray_address:
        from headrace.trainer.devices import learner_device

        learner_device("cuda")
    algorithm = config.learner.algorithm
    if isinstance(algorithm, PpoConfig) and algorithm.critic.warmup >= config.learner.steps:
        raise ConfigError(
            f"learner.algorithm.critic.warmup={algorithm.critic.warmup} leaves none of learner.steps="
            f"{config.learner.steps} to the policy; warm up for fewer batches"
        )
    if config.learner.lora.rank:
        if backend != "torch":
            raise ConfigError(f"learner.lora is trained by learner.backend=torch; {backend} trains whole weights")
        if not config.runtime.ray_address and find_spec("peft") is None:
            raise ConfigError("learner.lora needs peft: pip install 'headrace[lora]'")
    if config.learner.algorithm.name == "ppo" and backend != "torch":
        raise ConfigError(
            "the critic of ppo is held by learner.backend=torch alone; use it, or learner.algorithm.name=rloo"
        )
    if backend != "deepspeed":
        return
    if config.learner.environment_loss.coefficient:
        raise ConfigError(
            "learner.environment_loss is computed by learner.backend=torch alone; set its coefficient to 0"
        )
    if config.runtime.kind == "inprocess":
        raise ConfigError(
            "learner.backend=deepspeed has a process for each rank, and runtime.kind=inprocess has one; use"
            " learner.backend=torch or runtime.kind=ray"
        )
    if not config.runtime.ray_address and find_spec("deepspeed") is None:
        raise ConfigError(
            "learner.backend=deepspeed needs DeepSpeed, which is not installed: pip install 'headrace[deepspeed]', or"
            " use learner.backend=torch"
        )
    if config.learner.deepspeed.offload_optimizer and config.learner.deepspeed.stage == 0:
        raise ConfigError(
            "learner.deepspeed.offload_optimizer=true needs learner.deepspeed.stage 1, 2 or 3: without partitions there"
            " is nothing to offload"
        )


def check_runs_dir(config: RunConfig) -> None:
    """Refuse a folder for runs that cannot be opened, or that a run's processes do not share. Raises ConfigError."""
    fs, _ = open_url(config.runs_dir)
    if isinstance(fs, MemoryFileSystem) and config.runtime.kind != "inprocess":
        raise ConfigError(
            f"runs_dir={config.runs_dir} lies in the memory of one process, and runtime.kind={config.runtime.kind} has"
            " several; give a folder or an object store such as s3://bucket/runs, or set runtime.kind=inprocess"
        )


def check_secrets(config: RunConfig) -> None:
    """Refuse references to secrets that are not there. Raises ConfigError that names them."""
    resolve(config.queue.redis_url)
