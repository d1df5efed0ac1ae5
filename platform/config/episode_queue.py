"""The episode queue: its server and its limits."""

from pydantic import Field

from headrace.platform.config.base import StrictModel


class QueueConfig(StrictModel):
    """Where the ledger lives and what it enforces."""

    redis_url: str = ""
    """`redis://…`, `rediss://…` or `unix://…`; empty starts an embedded Valkey. Secrets by reference only."""
    max_lag: int = Field(4, ge=0)
    """Largest policy lag that is trained on, in learner batches (P14)."""
    min_group: int = Field(2, ge=1)
    """Smallest group that is still trained."""
    max_attempts: int = Field(3, ge=1)
    """Tries per slot when the environment or the infrastructure fails."""
    max_deliveries: int = Field(3, ge=1)
    """Deliveries of a group without a commit before it is dropped as poison."""
    group_deadline_s: float = Field(120.0, gt=0)
    """A group whose members have not all ended by then is closed without them."""
    max_failure_rate: float = Field(0.5, gt=0, le=1)
    """The run stops when a larger share of recent attempts failed (case E8)."""
