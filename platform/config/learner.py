"""How the learner learns."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from headrace.platform.config.algorithm import GrpoConfig
from headrace.platform.config.algorithms import AlgorithmConfig
from headrace.platform.config.base import StrictModel
from headrace.platform.config.deepspeed import DeepspeedConfig

Share = Annotated[float, Field(ge=0, lt=1)]


class LoraConfig(StrictModel):
    """Train low-rank adapters instead of the weights (`headrace[lora]`); versions are then adapters over the first
    one."""

    rank: int = Field(0, ge=0)
    """0 trains all weights."""
    alpha: int = Field(32, ge=1)
    """Adapters count alpha / rank."""
    targets: tuple[str, ...] = ()
    """Last names of the layers that get adapters, such as `q_proj`; none means all linear layers but the output
    layer."""

    @model_validator(mode="after")
    def _adapters_have_a_rank(self) -> "LoraConfig":
        given = sorted({"alpha", "targets"} & self.model_fields_set)
        if given and not self.rank and (self.targets or self.alpha != LoraConfig.model_fields["alpha"].default):
            raise ValueError(
                f"{', '.join(given)} without a rank trains all weights; set lora.rank, such as lora.rank=16"
            )
        return self


class EnvironmentLossConfig(StrictModel):
    """Learn to predict what the environment answers, beside what to do."""

    coefficient: float = Field(0.0, ge=0)
    """Of the mean cross entropy, in nats, over the tokens that the step's tools have sent; the chat template's own, and
    what users say, never count. 0 computes none."""


class LearnerConfig(StrictModel):
    """The optimizer, the batch, and how often weights are published and checkpointed."""

    backend: Literal["torch", "deepspeed"] = "torch"
    """`torch`: one process. `deepspeed`: `ranks` processes that share gradients, and state by ZeRO stages."""
    ranks: int = Field(1, ge=1)
    """Processes of the learner; the torch backend has one."""
    deepspeed: DeepspeedConfig = DeepspeedConfig()
    """Of the deepspeed backend."""
    algorithm: AlgorithmConfig = GrpoConfig()
    """Scores to gradients; without a `name` it is grpo."""
    lr: float = Field(1e-3, gt=0)
    betas: tuple[Share, Share] = (0.9, 0.95)
    weight_decay: float = Field(0.0, ge=0)
    warmup: int = Field(5, ge=0)
    """Steps of linear warm-up."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """What the rate does after the warm-up: stays, or goes down to `lr_end` of itself at the last of `steps`."""
    lr_end: float = Field(0.1, gt=0, le=1)
    """Share of `lr` that the last step has, where the schedule goes down."""
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
    environment_loss: EnvironmentLossConfig = EnvironmentLossConfig()
    lora: LoraConfig = LoraConfig()
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What the decoder computes in. Weights, gradients, optimizer, logits and losses are float32 in both. With bfloat16
    `gap_limit` wants to be about 0.05."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the learner computes. `auto`: the GPU that Ray or CUDA_VISIBLE_DEVICES gives its process, else the CPU."""
    gradient_checkpointing: bool = False
    """Compute each layer a second time for its gradient instead of keeping what it computed: less memory per token,
    about a third more time. Losses and gradients are the same."""
    threads: int = Field(1, ge=1)
    """CPU threads for tensor work."""

    @property
    def longest_wait_s(self) -> float:
        """How long the learner waits for a batch or for its ranks, whichever is longer."""
        return max(self.batch_deadline_s, self.deepspeed.deadline_s if self.backend == "deepspeed" else 0.0)

    @model_validator(mode="after")
    def _schedule_has_room(self) -> "LearnerConfig":
        if self.schedule != "constant" and self.warmup >= self.steps:
            raise ValueError(
                f"schedule={self.schedule} has no step after a warmup of {self.warmup} in steps={self.steps};"
                " warm up for fewer steps, or set schedule=constant"
            )
        return self

    @field_validator("algorithm", mode="before")
    @classmethod
    def _grpo_unless_named(cls, value: Any) -> Any:
        return {"name": "grpo", **value} if isinstance(value, dict) else value
