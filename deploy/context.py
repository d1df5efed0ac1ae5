"""What every process of a run must know. Travels to actors; holds references to secrets, not secrets, but for the
door token, which is made for one run and never written down.
"""

from dataclasses import dataclass, field
from pathlib import Path

from headrace.platform.config import RunConfig
from headrace.platform.node_cache import node_cache
from headrace.platform.records.delivery import LedgerLimits
from headrace.platform.store.run_root import RunRoot

POLICY_ID = "policy"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunContext:
    """One run.

    `ledger_url` is the embedded server's, or the recipe's `queue.redis_url` with its references unresolved.
    """

    run: str
    root: str
    config: RunConfig
    ledger_url: str = ""
    door_token: str = field(default="", repr=False)

    def local(self, name: str) -> Path:
        """A folder of this node for the run: in the run root where that is a local disk, else in the user's cache."""
        root = RunRoot(self.root)
        return root.local(name) if root.is_local else node_cache() / "runs" / self.run / name

    @property
    def logs(self) -> Path:
        """Where this run's processes write their logs."""
        return self.local("logs")

    @property
    def keep_versions(self) -> int:
        """How many of the newest versions a replica keeps loaded."""
        return self.config.serving.keep_versions or self.config.queue.max_lag + 1

    @property
    def limits(self) -> LedgerLimits:
        """What the ledger enforces."""
        queue, learner = self.config.queue, self.config.learner
        return LedgerLimits(
            batch_groups=learner.batch_groups,
            max_lag=queue.max_lag,
            min_group=queue.min_group,
            max_attempts=queue.max_attempts,
            max_deliveries=queue.max_deliveries,
            group_deadline_s=queue.group_deadline_s,
            dispatch_lease_s=queue.dispatch_lease_s,
            learner_term_s=queue.learner_term_s,
            max_age_s=queue.max_age_s,
            mask_over_lag=queue.over_lag == "mask",
            early_missing=queue.early_missing,
            lag_restarts=queue.lag_restarts,
            drop_zero_variance=learner.algorithm.needs_variance,
        )
