"""The episode: the unit of everything. Written once, by the side that played it."""

from typing import Any

import msgspec

from headrace.platform.records.ids import AttemptId
from headrace.platform.records.message import Cost, Task
from headrace.platform.records.permissions import UNSAID, Safety
from headrace.platform.records.status import FaultOwner, Purpose, Role, Status, StopReason, UpdateMode
from headrace.platform.records.turn import Turn, View
from headrace.platform.records.versions import VersionRef

SCHEMA_VERSION = 1


class Digests(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Content hashes of everything that an episode depended on besides its task and seed."""

    tokenizer: str = ""
    template: str = ""
    tool_schemas: str = ""
    gateway_policy: str = ""
    grader: str = ""
    code: str = ""
    config: str = ""


class Budgets(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Limits of one episode; reaching one ends it as BUDGET_EXHAUSTED (P27)."""

    max_turns: int = 4
    max_tokens: int = 512
    max_seconds: float = 60.0


class Stamps(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Server times in seconds since the epoch (P12); zero where the event has not happened."""

    dispatched_s: float = 0.0
    first_token_s: float = 0.0
    done_s: float = 0.0
    put_s: float = 0.0
    leased_s: float = 0.0


class InjectedFault(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A fault that was put in on purpose, so that a replay can put it in again."""

    turn: int
    kind: str
    detail: dict[str, Any] = {}


class Provenance(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """What an episode's world says of itself beside name and version. All of it goes into the episode.

    `pool` is the host that played it, `external` what was recorded instead of run, and `audit_head`, `safety` and
    `gateway_policy` are the gateway's (see `Episode`).
    """

    image_digest: str = ""
    sandbox_id: str = ""
    pool: str = ""
    injected_faults: tuple[InjectedFault, ...] = ()
    external: dict[str, list[Any]] = {}
    audit_head: str = ""
    safety: Safety = UNSAID
    gateway_policy: str = ""


class Episode(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One attempt, whole: who, on what, with which weights, what was said and done, and how it ended.

    `terminated` and `truncated` are never both set. `fault_owner` is NONE for an episode whose reward may be used.
    Rewards and fates are not here: they are side tables that grow after the episode is written.

    `parent_episode` and `branch_step` say where it branched off, if it did: its first turns are that episode's, masks,
    versions and all (`inherited_turns`), and `cost` holds them too, as a grader needs it.

    `pool` names the environment host, empty where the world was played in the worker. `external` is the cassette: what
    the world asked of services outside it, by step ("0" is the reset), so that a replay need not ask again.

    `audit_head` is the entry of the audit chain that stood last when the episode ended (CHAIN:NUMBER:HASH), empty where
    it called no tool.
    """

    schema_version: int = msgspec.field(default_factory=lambda: SCHEMA_VERSION)
    attempt_id: AttemptId
    task: Task
    environment: str
    environment_version: str
    seed: int
    version: VersionRef
    turns: tuple[Turn, ...]
    views: tuple[View, ...]
    status: Status
    stop_reason: StopReason
    terminated: bool
    truncated: bool
    fault_owner: FaultOwner = FaultOwner.NONE
    fault: str = ""
    image_digest: str = ""
    injected_faults: tuple[InjectedFault, ...] = ()
    parent_episode: str = ""
    branch_step: int | None = None
    update_mode: UpdateMode = UpdateMode.STICKY
    budgets: Budgets = Budgets()
    digests: Digests = Digests()
    final_state_hash: str = ""
    cost: Cost = Cost()
    stamps: Stamps = Stamps()
    duration_s: float = 0.0
    worker_id: str = ""
    sandbox_id: str = ""
    pool: str = ""
    external: dict[str, list[Any]] = {}
    audit_head: str = ""
    safety: Safety = UNSAID
    metadata: dict[str, Any] = {}

    @property
    def episode_id(self) -> str:
        """The text form of the attempt id."""
        return str(self.attempt_id)

    @property
    def purpose(self) -> Purpose:
        """What it was played for."""
        return self.attempt_id.purpose

    @property
    def dispatch_sequence(self) -> int:
        """The dense group number of P10."""
        return self.attempt_id.group

    @property
    def inherited_turns(self) -> int:
        """How many turns at its beginning are its parent's: sampled there, and only done again here. 0 for an episode
        that branches off none, and for one whose world did not come to the step that it was to begin from."""
        if self.branch_step is None:
            return 0
        if self.branch_step == 0:
            return min(1, len(self.turns))
        sampled = [index for index, turn in enumerate(self.turns) if turn.role is Role.ASSISTANT]
        return sampled[self.branch_step - 1] + 2 if len(sampled) >= self.branch_step else 0

    @property
    def oldest_version(self) -> int | None:
        """The lowest version over all action tokens, None for an episode without any (case T20)."""
        return min((v for turn in self.turns if (v := turn.oldest_version) is not None), default=None)

    @property
    def newest_version(self) -> int | None:
        """The highest version over all action tokens, None for an episode without any."""
        return max((span.version.number for turn in self.turns for span in turn.version_spans), default=None)

    @property
    def action_tokens(self) -> int:
        """How many tokens the policy sampled."""
        return sum(int(turn.action_mask.sum()) for turn in self.turns)
