"""What a rollout worker needs to know besides its parts."""

from dataclasses import dataclass, field

from headrace.actors.branching import WITHOUT, Branching
from headrace.platform.records.episode import Digests
from headrace.platform.records.status import UpdateMode


@dataclass(kw_only=True, slots=True)
class WorkerSettings:
    """Numbers and names; times in seconds.

    `max_episodes` bounds the slots that are played or wait for their delivery. `dispatch_lease_s` is the ledger's
    limit of that name: the leases are renewed every `renew_every_s`, or thrice in a lease if that is more often.
    `update_mode` is that of training episodes; evaluations are of one version throughout. `branching` says which
    members of a training group branch off its first.
    """

    run: str
    worker_id: str
    policy_id: str
    group_size: int
    max_episodes: int
    request_deadline_s: float
    digests: Digests = field(default_factory=Digests)
    update_mode: UpdateMode = UpdateMode.STICKY
    branching: Branching = WITHOUT
    idle_s: float = 0.01
    dispatch_lease_s: float = 15.0
    renew_every_s: float = 1.0
    confirm_every_s: float = 1.0

    @property
    def renewal_s(self) -> float:
        """Time between two renewals."""
        return min(self.renew_every_s, self.dispatch_lease_s / 3)
