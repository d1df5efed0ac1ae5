"""Whether the learner may start its next step, or first waits for groups that this step would push over the lag limit.

`wait` (P15) holds a step for every such group that is still played, at most `max_wait_s`. One that is ready, and
behind the batch, no waiting can save: the step that takes it is the one after this. Under `drop` and `mask` only
protected groups are waited for (P16): tasks that were lost to lag so often that dropping them once more would train
on the short episodes only; that waiting has a budget, a share of the run's time, and what is dropped after it is
spent is reported.

The decision is pure. `Pacer` adds up the time that it costs; who asks the ledger and who sleeps is the intake.
"""

from typing import NamedTuple

from headrace.platform.config.episode_queue import QueueConfig
from headrace.platform.records.delivery import AtRisk


class Pace(NamedTuple):
    """`start`: begin the step now. `length_bias`: doing so gives up protected groups (P16)."""

    start: bool
    length_bias: bool


def pace(risk: AtRisk, queue: QueueConfig, *, waited_s: float, protected_s: float, run_s: float) -> Pace:
    """The decision of P15 and P16.

    Args:
        risk: what would be over the limit after the step.
        queue: the policy and its bounds.
        waited_s: how long this step has been held already.
        protected_s: how long steps of this run were held for protected groups, this one included.
        run_s: how long the run has gone on.
    """
    if queue.over_lag == "wait":
        hold = risk.playing > 0 and waited_s < queue.max_wait_s
    else:
        hold = risk.protected > 0 and protected_s < queue.protect_share * run_s
    return Pace(not hold, not hold and risk.protected > 0)


class Pacer:
    """Counts, for one learner, what `pace` needs to know. Times are read off the caller's clock, in seconds.

    `held_s` and `length_bias` speak of the present step.
    """

    def __init__(self, queue: QueueConfig, began_s: float) -> None:
        self._queue = queue
        self._began_s = began_s
        self._protected_s = 0.0
        self._holding_since: float | None = None
        self.held_s = 0.0
        self.length_bias = False

    @property
    def asks(self) -> bool:
        """Whether the policy depends on what is at risk; otherwise nobody needs to ask the ledger."""
        queue = self._queue
        return queue.over_lag == "wait" or queue.lag_restarts > 0

    def begin_step(self) -> None:
        """A new step: its own waiting begins at nothing."""
        self._holding_since, self.held_s, self.length_bias = None, 0.0, False

    def may_start(self, risk: AtRisk, now_s: float) -> bool:
        """Whether the step may start now; counts the time since the last refusal as held."""
        if self._holding_since is not None:
            spent_s = now_s - self._holding_since
            self.held_s += spent_s
            self._protected_s += spent_s if self._queue.over_lag != "wait" else 0.0
        decision = pace(
            risk,
            self._queue,
            waited_s=self.held_s,
            protected_s=self._protected_s,
            run_s=now_s - self._began_s,
        )
        self._holding_since = None if decision.start else now_s
        self.length_bias = decision.length_bias
        return decision.start
