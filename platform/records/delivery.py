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

    `dispatch_lease_s` is how long a worker that says nothing keeps its groups (P2), `learner_lease_s` how long a
    leased group stays with a learner that says nothing, and `learner_term_s` how long a learner that says nothing
    keeps the run from another. `max_age_s` bounds the age of what is trained on (P17; 0: no bound).

    `mask_over_lag` keeps a group as long as one of its action tokens is within the limit (P15); otherwise members
    over the limit leave, and the group with them when fewer than `min_group` stay. `early_missing`: a group whose
    last chance has come is closed without up to so many members that are still played (P18; 0: never).
    `lag_restarts`: how often a group that was lost to lag is dispatched again as a new group over the same task, the
    last time under protection (P16).
    """

    batch_groups: int
    max_lag: int
    min_group: int = 2
    max_attempts: int = 3
    max_deliveries: int = 3
    group_deadline_s: float = 120.0
    dispatch_lease_s: float = 15.0
    learner_lease_s: float = 120.0
    learner_term_s: float = 15.0
    max_age_s: float = 0.0
    drop_zero_variance: bool = True
    mask_over_lag: bool = False
    early_missing: int = 0
    lag_restarts: int = 0


class GroupTicket(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A group to play: its dispatch sequence, its size, the version it is pinned to (P18), and the server's stamp.

    `position` is its place in the task source: its own number, or that of the group which it restarts (P16).
    `attempts` has (sample, attempt) of every slot to play: all of a new group, the rest of one whose worker is gone.
    """

    group: int
    position: int
    size: int
    version: int
    dispatched_s: float
    deadline_s: float
    attempts: tuple[tuple[int, int], ...]


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

    DONE carries the encoded episode (or nothing: the file has it), its hash, the file that already holds it durably
    (P9), its scalar score, the oldest and the newest version over its action tokens, and the environment's version
    as "NAME@VERSION" (P17). FAILED carries the owner of the fault and whether a retry makes sense.
    """

    attempt_id: AttemptId
    outcome: Outcome
    payload: bytes = b""
    payload_hash: str = ""
    store_file: str = ""
    score: float = 0.0
    oldest_version: int = 0
    newest_version: int = 0
    environment: str = ""
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
    payload_hash: str
    store_file: str
    score: float
    oldest_version: int
    newest_version: int


class LeasedGroup(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A group on its way through the learner: what its ticket said, its lag against the leasing parent, and its
    delivery count. `members` are those that may be trained; `size` counts every slot."""

    group: int
    position: int
    size: int
    version: int
    lag: int
    deliveries: int
    dispatched_s: float
    members: tuple[LeasedMember, ...]


class AtRisk(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Groups that are within the lag limit and would be over it one learner batch later (P15): still played, ready
    but behind the next batch, and how many of both are protected (P16)."""

    playing: int
    ready: int
    protected: int


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


class ChainVersion(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A version as its manifest states it."""

    number: int
    parent: int
    batches: int
    fence: int
    content_hash: str


class ChainMember(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An attempt that a manifest names, its fate, and what the ledger must know to deliver it once more."""

    sample: int
    attempt: int
    fate: str
    payload_hash: str
    store_file: str
    score: float
    oldest_version: int
    newest_version: int
    lag: int = 0


class ChainGroup(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A group that the version `consumed_by` consumed, as its manifest states it."""

    group: int
    position: int
    size: int
    version: int
    consumed_by: int
    members: tuple[ChainMember, ...]


class Chain(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What the manifest chain and the checkpoints say (P8), for a ledger that has lost writes.

    `epoch` was claimed in the registry and is above every earlier one. `head` is the newest version of the lineage
    that goes on, `settled` the newest with a complete checkpoint (-1: none), `next_number` above every version number
    ever used (P6). `consumed` has every group that a version after `settled` consumed, or one that the ledger does
    not know. `sequence` is above every group that the run root knows of, and `fates` counts the attempts whose end
    it knows: both matter for an empty server only.
    """

    epoch: int
    head: int
    settled: int
    next_number: int
    versions: tuple[ChainVersion, ...]
    consumed: tuple[ChainGroup, ...]
    sequence: int
    fates: dict[str, int]


class CancelNotice(msgspec.Struct, frozen=True, gc=False):
    """A running group that can no longer arrive in time, whose version was rolled back, or that another plays now."""

    group: int
    reason: CancelReason


class LedgerStats(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A consistent count of everything, from one atomic step (P3).

    `fates` has the keys "trained", "in_flight", "dropped:REASON", "failed:OWNER", "cancelled:REASON";
    `refused` counts puts by verdict. `head` is None before the first commit. `score_sum` and `score_count` run over
    every training episode that was put, whatever became of it: the unbiased success of the policy as played.

    `lags` counts trained attempts by the lag that they were trained with. `slot_seconds` is the time that ended
    attempts were played, by fate, and `lengths` counts them by kind of fate ("trained", "dropped", …) and length:
    bucket b holds 2**(b/2) to 2**((b+1)/2) seconds of play (P16). `groups_waiting` are open groups that nobody plays.
    `restarts_waiting` tasks of groups lost to lag wait for their next dispatch; `protection_lost` protected groups
    were lost to it after all: from one on there is a length bias. `learner` is who holds the run and
    `learner_silent_s` how long it has said nothing. `epoch` counts how often the ledger was rebuilt, and `suspect` says
    that it may have to be.
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
    lags: dict[int, int] = {}
    slot_seconds: dict[str, float] = {}
    lengths: dict[str, dict[int, int]] = {}
    restarts_waiting: int = 0
    protection_lost: int = 0
    groups_waiting: int = 0
    learner: str = ""
    learner_silent_s: float = 0.0
    epoch: int = 0
    suspect: bool = False

    @property
    def holds(self) -> bool:
        """The equation of P3: dispatched = trained + dropped + failed + cancelled + in flight."""
        return self.dispatched == sum(self.fates.values())
