"""How the learner learns."""

from typing import Any, Literal

from pydantic import Field, field_validator

from headrace.platform.config.algorithm import AlgorithmConfig, GrpoConfig
from headrace.platform.config.base import StrictModel


class LearnerConfig(StrictModel):
    """The optimizer, the batch, and how often weights are published and checkpointed."""

    backend: Literal["torch"] = "torch"
    ranks: int = Field(1, ge=1)
    """Processes of the learner; the torch backend has one."""
    algorithm: AlgorithmConfig = GrpoConfig()
    """Scores to gradients; without a `name` it is grpo."""
    lr: float = Field(1e-3, gt=0)
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = Field(0.0, ge=0)
    warmup: int = Field(5, ge=0)
    """Steps of linear warm-up."""
    clip_grad: float = Field(1.0, gt=0)
    """Largest gradient norm."""
    steps: int = Field(60, ge=1)
    batch_groups: int = Field(16, ge=1)
    """Groups per learner step."""
    oversample_max: float = Field(4.0, ge=1)
    """After this many batches' worth of zero-variance groups since the last commit, a smaller batch is accepted."""
    microbatch_tokens: int = Field(8192, ge=16)
    """Tokens per forward pass."""
    share_prefixes: bool = True
    """Compute what several samples begin with once, where the model can; losses and gradients are the same to
    rounding."""
    publish_every: int = Field(1, ge=1)
    """Learner steps between two published versions; at most `queue.max_lag` + 1."""
    checkpoint_every: int = Field(5, ge=1)
    """Published versions between two complete checkpoints."""
    keep_versions: int = Field(3, ge=1)
    """Newest versions whose weights are kept besides checkpoints and pinned ones."""
    keep_checkpoints: int = Field(2, ge=1)
    """Newest complete checkpoints kept."""
    batch_deadline_s: float = Field(120.0, gt=0)
    """How long the learner waits for a batch before the run fails by name; with vLLM at least as long as a replica may
    take to start again."""
    gap_limit: float = Field(0.01, gt=0)
    """How far apart engine and learner may find the logprobs of tokens of the same weights, mean in nats, before an
    alarm names the replica. Rounding is about 1e-5 in float32 and 1e-2 in bfloat16."""
    threads: int = Field(1, ge=1)
    """CPU threads for tensor work."""

    @field_validator("algorithm", mode="before")
    @classmethod
    def _grpo_unless_named(cls, value: Any) -> Any:
        return {"name": "grpo", **value} if isinstance(value, dict) else value
