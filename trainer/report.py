"""What a learner step reports: one flat record for metrics, summary and terminal."""

import msgspec

from headrace.trainer.gap import Gap, GapAlarm
from headrace.trainer.off_policy import OffPolicy

TERMS = ("entropy", "reference_kl", "value_loss", "environment_loss")
"""The policy's entropy and its divergence (k3) from the frozen reference, in nats; the critic's loss; and the cross
entropy on what tools sent, in nats. The names are those of the step's figures and of the metrics."""


class StepReport(msgspec.Struct, frozen=True, kw_only=True):
    """One learner step.

    `step` counts from 1. `version` is the head after the step and `published` says whether this step made it.
    `batches` is B of the weights after the step (P14). `loss`, `kl`, `clip_share` and `ratio_mean` are means over
    `loss_tokens`; `masked_tokens` left the loss because they were over the lag limit (P15). `episodes` of the batch
    were trained, in `groups` groups; `score_mean` includes those whose reward only shaped the baseline. `lags` counts
    trained episodes by lag, in learner batches. `busy` is the interval spent on the batch, computing and publishing,
    in seconds since the epoch; `wait_s` is what was spent waiting for it, `held_s` of it with a batch at hand, for
    groups about to be too old. `length_bias`: protected groups were given up all the same (P16). `dropped` counts
    groups that the learner itself refused, by reason. `gaps` are those between learner and engines, by version and
    replica; `alarms` name the replicas whose gap no learning explains (case S10). `off_policy` says how far the tokens
    were from the weights that trained on them, `by_lag` and `by_length` in each bucket. `terms` are means of what the
    loss has besides, by their names in `TERMS`, where it has them.
    """

    step: int
    version: int
    published: bool
    batches: int
    groups: int
    episodes: int
    loss_tokens: int
    loss: float
    kl: float
    clip_share: float
    ratio_mean: float
    grad_norm: float
    lr: float
    score_mean: float
    lags: dict[int, int]
    busy: tuple[float, float]
    wait_s: float
    masked_tokens: int = 0
    held_s: float = 0.0
    length_bias: bool = False
    dropped: dict[str, int] = {}
    gaps: tuple[Gap, ...] = ()
    alarms: tuple[GapAlarm, ...] = ()
    off_policy: OffPolicy | None = None
    by_lag: dict[int, OffPolicy] = {}
    by_length: dict[int, OffPolicy] = {}
    terms: dict[str, float] = {}

    @property
    def busy_s(self) -> float:
        """Length of the busy interval."""
        return self.busy[1] - self.busy[0]
