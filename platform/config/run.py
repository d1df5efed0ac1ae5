"""A whole run: the root of a recipe."""

from typing import Literal

from pydantic import Field, field_validator, model_validator

from headrace.platform.config.base import StrictModel
from headrace.platform.config.environments import EnvironmentConfig
from headrace.platform.config.episode_queue import QueueConfig
from headrace.platform.config.gateway import GatewayConfig
from headrace.platform.config.learner import LearnerConfig
from headrace.platform.config.loggers import LoggerConfigs
from headrace.platform.config.model import ModelConfig
from headrace.platform.config.resources import ResourcesConfig
from headrace.platform.config.rollout import RolloutConfig
from headrace.platform.config.serving import ServingConfig
from headrace.platform.config.sft import SftConfig
from headrace.platform.config.tasks import CurriculumConfig
from headrace.platform.records.status import UpdateMode


class EvalConfig(StrictModel):
    """Measuring success apart from training: own tasks, own seeds, a pinned version."""

    tasks: int = Field(256, ge=1)
    """Tasks per evaluation."""
    samples: int = Field(1, ge=1)
    """Episodes per task; pass^k needs k of them."""
    split: Literal["dev", "hidden"] = "dev"
    every: int = Field(0, ge=0)
    """Learner steps between two evaluations while training; 0 evaluates before and after only. The version with the
    best mean score is kept as `best`."""


class LogSamplesConfig(StrictModel):
    """Readable episodes in `logs/samples/`."""

    every: int = Field(10, ge=1)
    """Learner steps between two files."""
    n: int = Field(2, ge=1)
    """Episodes per file."""


class RuntimeConfig(StrictModel):
    """Where the parts run."""

    kind: Literal["ray", "inprocess"] = "ray"
    """`ray`: one process per part. `inprocess`: all in this process, without a server; deterministic."""
    ray_address: str = ""
    """Join this cluster; empty starts a local one."""
    max_restarts: int = Field(3, ge=0)
    """How often a part that died is started again without a learner step in between; then the run ends by name."""


class RunConfig(StrictModel):
    """Everything that decides what a run does."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$")
    """Prefix of the run's id."""
    seed: int = Field(0, ge=0)
    runs_dir: str = "runs"
    """Folder that holds run roots."""
    environments: tuple[EnvironmentConfig, ...] = Field(min_length=1)
    curriculum: CurriculumConfig = CurriculumConfig()
    model: ModelConfig
    sft: SftConfig | None = None
    rollout: RolloutConfig = RolloutConfig()
    gateway: GatewayConfig = GatewayConfig()
    queue: QueueConfig = QueueConfig()
    serving: ServingConfig = ServingConfig()
    learner: LearnerConfig = LearnerConfig()
    resources: ResourcesConfig = ResourcesConfig()
    eval: EvalConfig = EvalConfig()
    log_samples: LogSamplesConfig | None = LogSamplesConfig()
    loggers: LoggerConfigs = ()
    """Where metrics go besides `metrics.jsonl`."""
    runtime: RuntimeConfig = RuntimeConfig()

    @field_validator("environments")
    @classmethod
    def _listed_once(cls, value: tuple[EnvironmentConfig, ...]) -> tuple[EnvironmentConfig, ...]:
        names = [environment.known_as for environment in value]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(
                f"{', '.join(twice)} is listed more than once; use `weight` to play an environment more often, or give"
                " each its own `alias`"
            )
        return value

    @model_validator(mode="after")
    def _consistent(self) -> "RunConfig":
        if self.learner.publish_every > self.queue.max_lag + 1:
            raise ValueError(
                f"learner.publish_every={self.learner.publish_every} with queue.max_lag={self.queue.max_lag}: episodes"
                " would be over the limit before newer weights exist, so the run could never fill a batch."
                f" Use publish_every <= max_lag + 1 = {self.queue.max_lag + 1} (P14)."
            )
        if self.queue.min_group > self.learner.algorithm.group_size:
            raise ValueError(
                f"queue.min_group={self.queue.min_group} is larger than"
                f" learner.algorithm.group_size={self.learner.algorithm.group_size}; set queue.min_group="
                f"{self.learner.algorithm.group_size}"
            )
        self._check_updates()
        self._check_resources()
        return self

    def _check_updates(self) -> None:
        """P22: what a pool can do that holds as many versions as it has replicas."""
        serving, mode = self.serving, self.rollout.update_mode
        holds_one = serving.engine == "vllm" and not serving.vllm.adapters
        if holds_one and serving.replicas == 1 and mode is UpdateMode.STICKY and serving.drain == "forbidden":
            raise ValueError(
                "serving.engine=vllm with full weights holds one version at a time, so one replica cannot take up a new"
                " one while sticky episodes run on the old. Use rollout.update_mode=turn or inflight, LoRA"
                " (serving.vllm.adapters=4), more replicas (serving.replicas=2), or serving.drain=allowed (P22)."
            )
        if serving.engine == "vllm" and self.runtime.kind == "inprocess":
            raise ValueError(
                "runtime.kind=inprocess plays with the torch engine, token by token; serving.engine=vllm needs"
                " runtime.kind=ray"
            )
        lora = self.learner.lora.rank
        if serving.engine == "vllm" and bool(lora) != bool(serving.vllm.adapters):
            raise ValueError(
                f"learner.lora.rank={lora} and serving.vllm.adapters={serving.vllm.adapters}: vLLM holds adapters where"
                " the learner trains them, and whole weights where it trains those; set both"
                " (learner.lora.rank=16 serving.vllm.adapters=4) or neither"
            )
        if serving.engine == "vllm" and lora > serving.vllm.max_lora_rank:
            raise ValueError(
                f"learner.lora.rank={lora} is more than serving.vllm.max_lora_rank={serving.vllm.max_lora_rank}"
            )
        if serving.transport == "nccl" and lora:
            raise ValueError("serving.transport=nccl sends whole weights; learner.lora needs serving.transport=file")
        if serving.transport == "nccl" and serving.engine != "vllm":
            raise ValueError("serving.transport=nccl needs serving.engine=vllm; the torch engine takes files")

    def _check_resources(self) -> None:
        replica, learner = self.resources.replica, self.resources.learner
        shards = replica.tensor_parallel
        if shards > 1 and (self.serving.engine != "vllm" or not replica.gpus):
            raise ValueError(
                f"resources.replica.tensor_parallel={shards} needs serving.engine=vllm and resources.replica.gpus=1:"
                " one GPU for each shard"
            )
        if self.resources.layout == "apart":
            return
        if not (replica.gpus == learner.gpus == 1) or self.learner.ranks != self.serving.replicas * shards:
            raise ValueError(
                "resources.layout=colocated puts one rank of the learner and one shard of a replica on each GPU: it"
                " needs resources.learner.gpus=1 and resources.replica.gpus=1, and as many ranks"
                f" (learner.ranks={self.learner.ranks}) as shards (serving.replicas x tensor_parallel ="
                f" {self.serving.replicas * shards})"
            )
