"""The side tables of an episode: rewards, fates and training receipts. Rows are added, never changed."""

from collections.abc import Iterable
from enum import StrEnum

import msgspec

from headrace.platform.records.status import Fate, RewardKind


class RewardRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One reward component of one episode. `value` is None exactly when `valid` is false.

    A row with `turn` or `span` set belongs to that turn or token span, else to the whole episode. `supersedes` names
    the grader version whose rows it replaces. `number` tells components apart that one grader gave at one place: the
    first of a kind has 0, the next 1.
    """

    schema_version: int = msgspec.field(default_factory=lambda: 1)
    episode_id: str
    kind: RewardKind
    value: float | None
    valid: bool = True
    turn: int | None = None
    span: tuple[int, int] | None = None
    grader_version: str = ""
    evidence: str = ""
    supersedes: str = ""
    number: int = 0

    def __post_init__(self) -> None:
        if self.valid != (self.value is not None):
            raise ValueError("a reward row has a value exactly when it is valid: failure is never a reward")


def score_of(rows: Iterable[RewardRow]) -> float | None:
    """The sum of an episode's rewards, None when there are none or any is invalid: failure is never a reward, and
    neither is silence."""
    rewards = [row for row in rows if row.kind.is_reward]
    if not rewards or any(not row.valid for row in rewards):
        return None
    return float(sum(row.value or 0.0 for row in rewards))


class FateRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """What became of one attempt (P3), and under which version it was decided."""

    schema_version: int = msgspec.field(default_factory=lambda: 1)
    episode_id: str
    fate: Fate
    reason: str = ""
    version: int | None = None


class LossMaskReason(StrEnum):
    """Why an action token does not enter the loss; the action mask itself is never changed."""

    LAG = "lag"
    INHERITED = "inherited"
    AGENT = "agent"
    OVERLONG = "overlong"


class MaskedSpan(msgspec.Struct, frozen=True, gc=False):
    """Action tokens `[start, end)` of a turn that the loss left out."""

    turn: int
    start: int
    end: int
    reason: LossMaskReason


class Receipt(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """How one episode was trained on: stored by the learner beside the version that came of it.

    `advantages` has one value per policy turn; `ratio_mean` is over the tokens that entered the loss. `step` is the
    learner step, from 1; 0 in receipts that are older than the column.
    """

    schema_version: int = msgspec.field(default_factory=lambda: 1)
    episode_id: str
    version: int
    advantages: tuple[float, ...]
    masked: tuple[MaskedSpan, ...] = ()
    loss_tokens: int = 0
    ratio_mean: float = 1.0
    clip_share: float = 0.0
    lag: int = 0
    step: int = 0
