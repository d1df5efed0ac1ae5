"""Configuration: one small file per part. Recipes are YAML that `load.py` reads into `RunConfig`."""

from headrace.platform.config.algorithm import (
    GigpoConfig,
    GrpoConfig,
    PpoConfig,
    ReinforceConfig,
    RlooConfig,
)
from headrace.platform.config.algorithms import AlgorithmConfig
from headrace.platform.config.branch import BranchConfig
from headrace.platform.config.environments import BudgetConfig, EnvironmentConfig, SamplingConfig, ScorerConfig
from headrace.platform.config.episode_queue import QueueConfig
from headrace.platform.config.learner import LearnerConfig
from headrace.platform.config.model import ModelConfig, TinyLlamaConfig
from headrace.platform.config.rollout import RolloutConfig
from headrace.platform.config.run import EvalConfig, LogSamplesConfig, RunConfig, RuntimeConfig
from headrace.platform.config.serving import ServingConfig
from headrace.platform.config.sft import SftConfig, SftStageConfig
from headrace.platform.config.tasks import CurriculumConfig, TasksConfig

__all__ = [
    "AlgorithmConfig",
    "BranchConfig",
    "BudgetConfig",
    "CurriculumConfig",
    "EnvironmentConfig",
    "EvalConfig",
    "GigpoConfig",
    "GrpoConfig",
    "LearnerConfig",
    "LogSamplesConfig",
    "ModelConfig",
    "PpoConfig",
    "QueueConfig",
    "ReinforceConfig",
    "RlooConfig",
    "RolloutConfig",
    "RunConfig",
    "RuntimeConfig",
    "SamplingConfig",
    "ScorerConfig",
    "ServingConfig",
    "SftConfig",
    "SftStageConfig",
    "TasksConfig",
    "TinyLlamaConfig",
]
