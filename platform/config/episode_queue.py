"""The episode queue: its server and its limits."""

from typing import Literal

from pydantic import Field

from headrace.platform.config.base import StrictModel


class QueueConfig(StrictModel):
    """Where the ledger lives and what it enforces."""

    redis_url: str = ""
    """`redis://…`, `rediss://…` or `unix://…`; empty starts an embedded Valkey. Secrets by reference only."""
    max_lag: int = Field(4, ge=0)
    """Largest policy lag that is trained on, in learner batches (P14)."""
    over_lag: Literal["drop", "mask", "wait"] = "drop"
    """What happens at the limit (P15). `drop`: what is over it leaves. `mask`: its tokens leave the loss and its reward
    stays in the baseline. `wait`: the learner waits for groups that its next step would push over it."""
    max_wait_s: float = Field(60.0, ge=0)
    """Longest wait before one learner step under `wait`."""
    protect_share: float = Field(0.05, ge=0, le=1)
    """Share of the run's time that may be spent waiting for tasks that were lost to lag again and again (P16)."""
    lag_restarts: int = Field(2, ge=0)
    """How often a task that was lost to lag is played again; the last time it is protected (P16)."""
    early_missing: int = Field(0, ge=0)
    """A group whose last chance to be in time has come is closed without up to so many members (P18)."""
    max_age_s: float = Field(0.0, ge=0)
    """Largest age of what is trained on, from dispatch (P17); 0: no bound."""
    min_group: int = Field(2, ge=1)
    """Smallest group that is still trained."""
    max_attempts: int = Field(3, ge=1)
    """Tries per slot when the environment or the infrastructure fails."""
    max_deliveries: int = Field(3, ge=1)
    """Deliveries of a group without a commit before it is dropped as poison."""
    group_deadline_s: float = Field(120.0, gt=0)
    """A group whose members have not all ended by then is closed without them."""
    dispatch_lease_s: float = Field(15.0, gt=0)
    """How long a rollout worker that says nothing keeps its groups (P2)."""
    learner_term_s: float = Field(15.0, gt=0)
    """How long a learner that says nothing keeps the run from another one."""
    away_deadline_s: float = Field(60.0, gt=0)
    """How long the parts wait for a server that is away before the run ends by name."""
    max_failure_rate: float = Field(0.5, gt=0, le=1)
    """The run stops when a larger share of recent attempts failed (case E8)."""
