"""Which algorithm turns scores into gradients, and the options of its loss.

`name` says which one; every algorithm has the options of `AlgorithmOptions`. Defaults are the same for all, so that
two algorithms differ in what their names say and in nothing else. The formulas stand where they are computed, in
trainer/.
"""

from typing import Annotated, Literal, TypeVar

from pydantic import Field, model_validator

from headrace.platform.config.base import StrictModel


class KlConfig(StrictModel):
    """Keeps the policy near the frozen reference: the weights that the run began with."""

    coefficient: float = Field(0.0, ge=0)
    """0 computes none, and needs no reference."""
    kind: Literal["k1", "k2", "k3"] = "k3"
    """The estimator. k1 is the log ratio itself: in the loss its gradient is 0 on average, in the reward it is the
    exact penalty. k2 is half its square, k3 is never negative and has little variance."""
    against: Literal["reference"] = "reference"
    where: Literal["loss", "reward"] = "loss"
    """`loss`: a term of the loss, with gradient. `reward`: each action token is charged for what is left of its
    sequence, measured when it was sampled."""


class CorrectionConfig(StrictModel):
    """What is done about tokens that older weights have sampled."""

    kind: Literal["clip", "decoupled"] = "clip"
    """`clip`: the ratio to the weights that sampled is clipped. `decoupled`: the ratio to the weights at the start of
    the batch is clipped, and the rest of the way is a truncated importance weight. A learner step is one
    optimizer step, so the ratio that `decoupled` clips is 1 and its clips never bind: the weight is what corrects."""
    weights: Literal["token", "sequence"] = "token"
    """Of `decoupled`: one weight per token, or the product of all of a sequence."""
    cap: float = Field(2.0, ge=1)
    """Largest importance weight of `decoupled`."""
    keep: tuple[Annotated[float, Field(ge=0)], Annotated[float, Field(gt=0)]] | None = None
    """Sequences whose geometric mean ratio is outside these bounds teach nothing; none keeps all."""

    @model_validator(mode="after")
    def _bounds_hold_one(self) -> "CorrectionConfig":
        if self.keep is not None and not self.keep[0] <= 1.0 <= self.keep[1]:
            raise ValueError(f"keep={list(self.keep)} must hold 1, the ratio of tokens that the present weights sample")
        return self


class ReturnsConfig(StrictModel):
    """How reward rows become returns: task + cost * costs + safety * safeties + discounted process rewards.

    Rows of cost and safety have the sign of rewards: what is bad is negative."""

    credit: Literal["episode", "to_go"] = "episode"
    """`episode`: all turns earn the whole return. `to_go`: a turn earns no process reward of the turns before it."""
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount per turn. Observation tokens are no time."""
    cost: float = Field(1.0, ge=0)
    safety: float = Field(1.0, ge=0)
    shaping: bool = False
    """Whether rewards come of the potentials of states (reward rows of kind `potential`): dense, and the best policy
    stays the best. For algorithms that credit turn by turn."""

    @property
    def plain(self) -> bool:
        """Whether every turn's return is the plain sum of all rewards."""
        return self.credit == "episode" and self.gamma == self.cost == self.safety == 1.0 and not self.shaping


class AlgorithmOptions(StrictModel):
    """What all algorithms share."""

    name: str
    group_size: int = Field(8, ge=2)
    """Episodes per group; all share task and environment seed."""
    clip_low: float = Field(0.2, gt=0, lt=1)
    clip_high: float = Field(0.28, gt=0)
    """Larger than `clip_low` is clip-higher."""
    ratio: Literal["token", "sequence", "product"] = "token"
    """`sequence` is GSPO's: the geometric mean over a sequence, which wants clips of 3e-4 and 4e-4. `product` is that
    of a sequence as one action, as in TRL's RLOO; it wants `aggregation=sequence` and short sequences."""
    aggregation: Literal["token", "sequence", "fixed"] = "token"
    """`token`: the mean over all loss tokens of a step. `sequence`: the mean over sequences of their means. `fixed`:
    the sum over each sequence divided by `fixed_length`."""
    fixed_length: int = Field(1024, ge=1)
    """Tokens that a sequence counts for with aggregation `fixed`."""
    kl: KlConfig = KlConfig()
    entropy: float = Field(0.0, ge=0)
    """Coefficient of the policy's mean entropy in nats, a bonus."""
    correction: CorrectionConfig = CorrectionConfig()
    returns: ReturnsConfig = ReturnsConfig()

    @property
    def needs_variance(self) -> bool:
        """Whether a group of equal scores teaches nothing, so that the queue drops it: not where returns are more than
        scores."""
        return self.returns.plain

    @model_validator(mode="after")
    def _shaping_is_seen(self) -> "AlgorithmOptions":
        if self.returns.shaping and self.returns.credit == "episode" and self.name != "ppo":
            raise ValueError(
                f"returns.shaping=true changes nothing for {self.name} with returns.credit=episode: over a whole"
                " episode its rewards cancel; use ppo, or returns.credit=to_go with rloo or reinforce"
            )
        return self


T = TypeVar("T", bound=AlgorithmOptions)


class GrpoConfig(AlgorithmOptions):
    """Group-relative policy optimization."""

    name: Literal["grpo"] = "grpo"
    epsilon: float = Field(1e-4, gt=0)
    """Added to the group's standard deviation."""
    scale: Literal["std", "none"] = "std"
    """`none` is Dr. GRPO: returns are compared, not divided by their standard deviation."""

    @model_validator(mode="after")
    def _whole_episodes(self) -> "GrpoConfig":
        return _refuse_to_go(self)


class RlooConfig(AlgorithmOptions):
    """REINFORCE leave-one-out: the mean of the other members is the baseline."""

    name: Literal["rloo"] = "rloo"


class ReinforceConfig(AlgorithmOptions):
    """REINFORCE with a baseline."""

    name: Literal["reinforce"] = "reinforce"
    group_size: int = Field(8, ge=1)
    """Episodes per group; all share task and environment seed. 1 needs a baseline from outside of the group, and
    `queue.min_group=1`."""
    baseline: Literal["group", "running", "none"] = "group"
    """`group`: the group's mean. `running`: an exponential mean over the batches before. `none`: 0."""
    decay: float = Field(0.9, ge=0, lt=1)
    """What the running mean keeps of itself at each batch."""

    @property
    def needs_variance(self) -> bool:
        """Only where the group is its own baseline."""
        return self.baseline == "group" and self.returns.plain

    @model_validator(mode="after")
    def _a_group_has_members(self) -> "ReinforceConfig":
        if self.group_size < 2 and self.baseline == "group":
            raise ValueError("baseline=group with group_size=1 leaves nothing to learn; use baseline=running")
        return self


class GigpoConfig(AlgorithmOptions):
    """Group-in-group policy optimization: episodes are compared, and so are actions in equal states."""

    name: Literal["gigpo"] = "gigpo"
    epsilon: float = Field(1e-4, gt=0)
    """Added to standard deviations."""
    scale: Literal["std", "none"] = "std"
    step_weight: float = Field(1.0, ge=0)
    """What the comparison of actions counts beside that of episodes."""
    step_gamma: float = Field(0.95, gt=0, le=1)
    """Discount per turn of the returns that actions in equal states are compared by."""

    @property
    def needs_variance(self) -> bool:
        """Not where actions are compared: how soon a success came tells them apart."""
        return self.returns.plain and self.step_weight == 0

    @model_validator(mode="after")
    def _whole_episodes(self) -> "GigpoConfig":
        return _refuse_to_go(self)


class GaeConfig(StrictModel):
    """Generalized advantage estimation: how far ahead rewards are believed, and how far the critic."""

    over: Literal["turn", "token", "action"] = "turn"
    """What a step of time is. `turn`: a turn of the policy, however long. `token`: an action token. `action`: the turns
    up to and with one that acted on the world, so that one which could not be read is no step of its own. Observation
    tokens are none in any of them."""
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount per step."""
    lam: float = Field(0.95, ge=0, le=1)
    """λ: 0 believes the critic, 1 the rewards."""
    bootstrap: Literal["environment", "always"] = "environment"
    """Which episodes are credited with the value of their last state, as if they could go on. `environment`: those that
    the environment truncated. `always`: also those that a budget of the recipe cut off. Success is measured within
    the budgets, and the state reached is graded, so that without need this pays for never finishing; if at all, then
    with `gamma` below 1. Episodes that terminated never are."""


class CriticConfig(StrictModel):
    """What estimates the value of a state."""

    kind: Literal["head", "model"] = "head"
    """`head`: a linear layer on the policy's last hidden state. `model`: a copy of the base model of its own."""
    lr: float = Field(1e-3, gt=0)
    """Learning rate of the critic's own weights, without a schedule."""
    coefficient: float = Field(0.5, gt=0)
    """Of the value loss. With `head` it is how much the policy's weights are shaped by it."""
    detach: bool = False
    """Of `head`: the value loss does not reach the policy's weights."""
    clip: float = Field(0.2, gt=0)
    """How far a value may move in a step before its gradient ends, in units of reward; matters from the second of
    `epochs` on."""
    epochs: int = Field(1, ge=1)
    """Optimizer steps of the critic on each batch. The first is together with the policy's; the others train the
    critic's own weights alone."""
    warmup: int = Field(0, ge=0)
    """Batches at the beginning in which only the critic's own weights learn."""


class PpoConfig(AlgorithmOptions):
    """Proximal policy optimization with a critic."""

    name: Literal["ppo"] = "ppo"
    group_size: int = Field(8, ge=1)
    """Episodes per group; all share task and environment seed. They are not compared. 1 needs `queue.min_group=1`."""
    gae: GaeConfig = GaeConfig()
    critic: CriticConfig = CriticConfig()
    normalize: bool = True
    """Whether advantages are made to have mean 0 and deviation 1 over the steps of a batch."""

    @property
    def needs_variance(self) -> bool:
        """The critic is the baseline, not the group."""
        return False

    @model_validator(mode="after")
    def _time_is_of_gae(self) -> "PpoConfig":
        if self.returns.credit != "episode" or self.returns.gamma != 1.0:
            raise ValueError("ppo credits by gae.over and gae.gamma; leave returns.credit and returns.gamma out")
        if self.returns.shaping and self.gae.over != "turn" and self.gae.gamma != 1.0:
            raise ValueError("returns.shaping discounts by turns; use gae.over=turn or gae.gamma=1 with it")
        return self


def _refuse_to_go(config: T) -> T:
    if config.returns.credit != "episode":
        raise ValueError(f"{config.name} compares whole episodes; returns.credit=to_go is for rloo and reinforce")
    return config
