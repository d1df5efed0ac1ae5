"""Which worlds the episodes play in."""

import re
from typing import Any

from pydantic import Field, field_validator, model_validator

from headrace.platform.config.base import StrictModel
from headrace.platform.config.faults import FaultConfig
from headrace.platform.config.gateway import BOXED_TOOLS, PermissionsConfig, ToolConfig
from headrace.platform.config.pools import PoolConfig
from headrace.platform.config.sandbox import SandboxConfig
from headrace.platform.config.tasks import TasksConfig
from headrace.platform.records.episode import Budgets


class BudgetConfig(StrictModel):
    """Limits of one episode; reaching one ends it as BUDGET_EXHAUSTED."""

    max_turns: int = Field(4, ge=1)
    """Turns of the policy."""
    max_tokens: int = Field(512, ge=1)
    """Tokens of the whole context, prompts and observations included."""
    max_seconds: float = Field(60.0, gt=0)
    """Wall time."""

    def budgets(self) -> Budgets:
        """The record form."""
        return Budgets(self.max_turns, self.max_tokens, self.max_seconds)


class SamplingConfig(StrictModel):
    """How the policy samples."""

    temperature: float = Field(1.0, gt=0)
    """The learner divides its logits by the same temperature."""
    max_new_tokens: int = Field(16, ge=1)
    """Tokens per turn."""
    top_p: float = 1.0
    """Must be 1 for training: the kept set is not recorded."""
    top_k: int = 0
    """Must be 0 for training: the kept set is not recorded."""

    @field_validator("top_p")
    @classmethod
    def _top_p_is_one(cls, value: float) -> float:
        if value != 1.0:
            raise ValueError(
                "top_p changes the distribution without a record of the kept set, so its logprobs cannot be trained on;"
                " use temperature"
            )
        return value

    @field_validator("top_k")
    @classmethod
    def _top_k_is_zero(cls, value: int) -> int:
        if value != 0:
            raise ValueError(
                "top_k changes the distribution without a record of the kept set, so its logprobs cannot be trained on;"
                " use temperature"
            )
        return value


class ScorerConfig(StrictModel):
    """Who grades finished episodes, besides the environment itself. Runs in processes of its own."""

    kind: str
    """`exact`, `numeric`, `regex`, or your own as `./file.py:Name` or `package.module:Name`."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Passed to the scorer."""
    deadline_s: float = Field(10.0, gt=0)
    """How long one episode may take; beyond it there is no reward, not a zero."""
    processes: int = Field(1, ge=1, le=64)
    """How many processes grade at once, for each rollout worker; started as they are needed."""


class EnvironmentConfig(StrictModel):
    """One environment of a recipe. A recipe lists several and mixes them by weight."""

    name: str = Field(min_length=1)
    """A registered name such as `lookup`, an entry point of an installed package, `./file.py:Name`,
    `package.module:Name`, or `reasoning_gym:NAME`."""
    alias: str = Field("", pattern=r"^[A-Za-z0-9_-]*$")
    """What metrics, episodes and evaluations call it; empty means the last part of `name`."""
    weight: float = Field(1.0, gt=0)
    """Share of groups, relative to the other environments."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Passed to the environment and its task source; unknown ones are errors there."""
    tasks: TasksConfig | None = None
    """Where the tasks come from, for environments that bring none or should play others."""
    scorer: ScorerConfig | None = None
    """Adds its reward components to those of the environment."""
    sandbox: SandboxConfig | None = None
    """The box that its tools run in, for environments that can use one; short form `sandbox: bubblewrap`."""
    pool: PoolConfig | None = None
    """Hosts that play it, instead of the rollout workers; short form `pool: ws://127.0.0.1:8700`."""
    tools: tuple[ToolConfig, ...] = ()
    """Tools mounted beside its own; short form `tools: [shell, files]`."""
    permissions: PermissionsConfig = PermissionsConfig()
    """What calls of its episodes may do; the gateway decides by it."""
    faults: tuple[FaultConfig, ...] = ()
    """Faults to put into its training episodes."""
    sampling: SamplingConfig = SamplingConfig()
    budgets: BudgetConfig = BudgetConfig()
    reset_deadline_s: float = Field(30.0, gt=0)
    """How long `reset` may take (case X15)."""
    step_deadline_s: float = Field(30.0, gt=0)
    """How long one `step` may take, with all its calls; a command of `shell` or `python` gets what is left of it."""

    @model_validator(mode="after")
    def _boxes_are_where_it_is_played(self) -> "EnvironmentConfig":
        boxed = any(tool.kind in BOXED_TOOLS for tool in self.tools)
        if self.sandbox is not None and self.pool is not None and not boxed:
            raise ValueError("give sandbox to `headrace env serve` on the hosts of the pool, not to the run")
        return self

    @model_validator(mode="after")
    def _injected_time_outs_are_seen(self) -> "EnvironmentConfig":
        longest = max((fault.seconds for fault in self.faults), default=0.0)
        if longest >= self.budgets.max_seconds:
            raise ValueError(
                f"a fault of {longest:g} s lasts longer than an episode may (budgets.max_seconds is"
                f" {self.budgets.max_seconds:g}); that would be the end of the budget, which is no fault"
            )
        return self

    @model_validator(mode="after")
    def _approvals_end_before_the_step(self) -> "EnvironmentConfig":
        approvals, seconds = self.permissions.approvals, self.permissions.approval_s
        if approvals != "deny" and seconds >= self.step_deadline_s:
            raise ValueError(
                f"permissions.approval_s ({seconds:g}) must be less than step_deadline_s ({self.step_deadline_s:g}), or"
                " the step ends before anybody has answered; lower the one or raise the other"
            )
        return self

    @property
    def known_as(self) -> str:
        """The alias, or the last part of the name: `Maze` for `./worlds/maze.py:Maze`."""
        return self.alias or re.split(r"[:/.]", self.name)[-1]
