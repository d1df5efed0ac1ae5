"""All algorithms that a recipe may name."""

from typing import Annotated

from pydantic import Field

from headrace.platform.config.algorithm import GigpoConfig, GrpoConfig, PpoConfig, ReinforceConfig, RlooConfig
from headrace.platform.config.branch import BranchConfig

AlgorithmConfig = Annotated[
    GrpoConfig | RlooConfig | ReinforceConfig | PpoConfig | GigpoConfig | BranchConfig,
    Field(discriminator="name"),
]
