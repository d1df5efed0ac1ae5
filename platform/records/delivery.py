"""What crosses the ledger: admissions, submissions, leases, commits (docs/protocol.md).

Numbers of versions are ints here: inside one run the number alone names a version (P6).
"""

from enum import StrEnum

import msgspec

from headrace.platform.records.ids import AttemptId
from headrace.platform.records.status import CancelReason, FaultOwner


class LedgerLimits(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The run's limits, the same for everyone who connects.

    `batch_groups` groups make a learner batch; `max_lag` is in learner batches (P14); `max_attempts` bounds the tries
    of a slot and `max_deliveries` those of a group (poison, P3); a group with fewer than `min_group` usable members
    is dropped; `group_deadline_s` frees a group whose members never end (case E7).
    """

    batch_groups: int
    max_lag: int
    min_group: int = 2
    max_attempts: int = 3
    max_deliveries: int = 3
    group_deadline_s: float = 120.0
    learner_lease_s: float = 120.0
    drop_zero_variance: bool = True


class GroupTicket(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An admitted group: its dispatch sequence, its size, the version it was admitted for, and the server's stamp."""

    group: int
    size: int
    version: int
    dispatched_s: float
    deadline_s: float


class Refusal(StrEnum):
    """Why an admission was refused; each clears by itself."""

    NONE = ""
    CAPACITY = "capacity"
    STALE_VERSION = "stale_version"
    NO_HEAD = "no_head"
    STOPPED = "stopped"


class Admission(msgspec.Struct, frozen=True, gc=False):
    """The groups admitted (perhaps fewer than asked) and, when there are none, why."""

    tickets: tuple[GroupTicket, ...]
    refusal: Refusal = Refusal.NONE


class Outcome(StrEnum):
    """How an attempt ended on the worker's side."""

    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Submission(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """The end of an attempt, as put.

    DONE carries the encoded episode, its hash, the file that already holds it durably (P9), its scalar score and the
    oldest version over its action tokens. FAILED carries the owner of the fault and whether a retry makes sense.
    """

    attempt_id: AttemptId
    outcome: Outcome
    payload: bytes = b""
    payload_hash: str = ""
    store_file: str = ""
    score: float = 0.0
    oldest_version: int = 0
    action_tokens: int = 0
    owner: FaultOwner = FaultOwner.NONE
    retryable: bool = False
    reason: str = ""


class Verdict(StrEnum):
    """The ledger's answer to one submission (P2)."""

    ACCEPTED = "accepted"
    RETRY = "retry"
    DUPLICATE = "duplicate"
    SUPERSEDED = "superseded"
    GROUP_CLOSED = "group_closed"
    LATE = "late"
    CONFLICT = "conflict"

    @property
    def is_refusal(self) -> bool:
        """The submission changed nothing."""
        return self not in (Verdict.ACCEPTED, Verdict.RETRY)


class PutReply(msgspec.Struct, frozen=True, gc=False):
    """The verdict, and for RETRY the number of the attempt to play next in the same slot."""

    verdict: Verdict
    next_attempt: int = 0


class LeasedMember(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One episode of a leased group. `payload` is empty when the ledger keeps the id only: read `store_file` then."""

    attempt_id: AttemptId
    payload: bytes
    store_file: str
    score: float
    oldest_version: int


class LeasedGroup(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A group on its way through the learner, with its lag against the leasing parent and its delivery count."""

    group: int
    version: int
    lag: int
    deliveries: int
    dispatched_s: float
    members: tuple[LeasedMember, ...]


class CommitRequest(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Publish version `number` over `parent` (P7).

    `fates` maps the text of every attempt in every group leased under this fence and consumed by this version to its
    fate: "trained" or "dropped:REASON". `batches` is how many learner batches lie between parent and this version.
    """

    fence: int
    number: int
    parent: int
    content_hash: str
    batches: int
    fates: dict[str, str]


class CancelNotice(msgspec.Struct, frozen=True, gc=False):
    """A running group that can no longer arrive in time or whose version was rolled back."""

    group: int
    reason: CancelReason


class LedgerStats(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A consistent count of everything, from one atomic step (P3).

    `fates` has the keys "trained", "in_flight", "dropped:REASON", "failed:OWNER", "cancelled:REASON";
    `refused` counts puts by verdict. `head` is None before the first commit. `score_sum` and `score_count` run over
    every training episode that was put, whatever became of it: the unbiased success of the policy as played.
    """

    dispatched: int
    fates: dict[str, int]
    refused: dict[str, int]
    head: int | None
    head_batches: int
    fence: int
    dispatch_sequence: int
    groups_open: int
    groups_ready: int
    groups_leased: int
    groups_consumed: int
    zero_variance_since_commit: int
    score_sum: float
    score_count: int
    payload_bytes: int
    revision: int
    stopped: bool

    @property
    def holds(self) -> bool:
        """The equation of P3: dispatched = trained + dropped + failed + cancelled + in flight."""
        return self.dispatched == sum(self.fates.values())
