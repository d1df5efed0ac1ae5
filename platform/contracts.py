"""The seams of headrace. Each has a fake, a conformance suite, and says here who owns what and how it fails.

`platform/testing/fakes` has the fakes and `platform/testing/conformance` the suites; both are product code, so that
whoever brings an environment, a scorer or an engine can run ours against it.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar, Union, runtime_checkable

import msgspec

from headrace.platform.records.arrays import F32
from headrace.platform.records.delivery import (
    Admission,
    CancelNotice,
    CommitRequest,
    LeasedGroup,
    LedgerStats,
    PutReply,
    Submission,
)
from headrace.platform.records.episode import Episode
from headrace.platform.records.generation import Generation, GenerationRequest
from headrace.platform.records.message import (
    Message,
    Observation,
    RewardComponent,
    StepResult,
    Task,
    ToolCall,
    ToolSpec,
)
from headrace.platform.records.tables import FateRow
from headrace.platform.records.versions import VersionManifest

T = TypeVar("T")
MaybeAwaitable: TypeAlias = Union[T, Awaitable[T]]  # noqa: UP007 - a union with a type variable cannot be written with | here


# --- tasks and environments -------------------------------------------------------------------------------------------


class TaskSource(Protocol):
    """A deterministic sequence of tasks; its state is a position in it.

    Group number g plays task g, so any worker can take any group and the position in a checkpoint is the dispatch
    sequence. Sources of finite data start over with a new order each epoch.
    """

    @property
    def split(self) -> str:
        """One of "train", "dev" and "hidden"; splits share no task and no seed."""

    @property
    def state(self) -> int:
        """The position: how many tasks have been given out."""

    def restore(self, state: int) -> None:
        """Go to a position that `state` returned, forwards or backwards."""

    def next(self, n: int) -> Sequence[Task]:
        """The next `n` tasks. Raises ConfigError when there are none at all."""


@runtime_checkable
class Environment(Protocol):
    """One session of a world. Methods may be plain or async; plain ones run off the event loop, one at a time.

    Order: `reset`, then `step` until a result is terminated or truncated, then nothing but `snapshot` and `close`: a
    step after the end raises. A failure of the environment is raised as EnvironmentFault or anything else, never
    returned as a reward; a mistake of the model is returned, as an observation with status MODEL_INVALID_ACTION.
    """

    name: str
    version: str

    def tools(self) -> Sequence[ToolSpec]:
        """The tools on offer; the same for the whole session."""

    def reset(self, task: Task, seed: int) -> MaybeAwaitable[Observation]:
        """Begin. The same task and seed give the same observation and state hash."""

    def step(self, message: Message, key: str) -> MaybeAwaitable[StepResult]:
        """Act. The same key again returns the recorded result; the same key with another message raises (P25)."""

    def snapshot(self) -> MaybeAwaitable[str]:
        """Keep the present state and return its id."""

    def restore(self, snapshot_id: str) -> MaybeAwaitable[None]:
        """Go back to a snapshot, as a new branch with an empty key table (P26)."""

    def clone(self) -> MaybeAwaitable["Environment"]:
        """An independent session in the present state."""

    def close(self) -> MaybeAwaitable[None]:
        """Release everything; safe to call twice."""


class Scorer(Protocol):
    """Turns a finished episode into reward components. Runs in a process of its own, under a deadline.

    A raise or a time-out becomes a component with `valid=False`; only what it returns is a reward (case E1).
    """

    version: str

    def score(self, task: Task, episode: Episode) -> Sequence[RewardComponent]:
        """Components for one episode."""

    def score_group(self, task: Task, episodes: Sequence[Episode]) -> Sequence[Sequence[RewardComponent]]:
        """Components for each episode of a group, in order; for scorers that compare."""


# --- tokens -----------------------------------------------------------------------------------------------------------


class ParsedMessage(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What sampled tokens say. `error` is empty, or explains to the model why its tool call cannot be read."""

    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    error: str = ""


class Renderer(Protocol):
    """Messages to tokens and sampled tokens to messages; one object for training, evaluation and HTTP. What a method
    returns depends on its arguments alone, so that callers may remember it.

    Text that came from outside is encoded as plain text: no special token can come out of a tool (case T5).
    """

    stop_token_ids: tuple[int, ...]
    digest: str

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        """The whole prompt, up to and including the header that lets the assistant speak."""

    def bridge(self, messages: Sequence[Message], ended: bool) -> list[int] | None:
        """Tokens that follow a sampled assistant turn: closing it if it has not `ended` with a stop token, then
        `messages`, then the assistant's header. None where this cannot be exact: the caller opens a new segment."""

    def parse(self, token_ids: Sequence[int]) -> ParsedMessage:
        """Read sampled tokens. Never raises: what cannot be read is an `error` for the model (case X1)."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text for people to read."""


# --- sandboxes and tools ----------------------------------------------------------------------------------------------


class CommandResult(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What a command left: its exit code (None when it was killed), bounded output, and which limit ended it."""

    exit_code: int | None
    output: str
    truncated_bytes: int = 0
    limit: str = ""
    seconds: float = 0.0


class Sandbox(Protocol):
    """One box, already running. Owned by whoever created it; `close` is safe to call twice."""

    sandbox_id: str

    async def run(self, command: str, timeout_s: float) -> CommandResult:
        """Run in the box's shell. A command that outruns its limit is a result, not an error (P27)."""

    async def read(self, path: str) -> bytes:
        """A file's bytes. Raises FileNotFoundError."""

    async def write(self, path: str, data: bytes) -> None:
        """Create or replace a file."""

    async def snapshot(self) -> str:
        """Keep the file system and return an id for `SandboxProvider.restore`."""

    async def close(self) -> None:
        """End every process in the box and release it."""


class SandboxProvider(Protocol):
    """Makes boxes. Refuses, rather than weakens, when it cannot isolate as declared."""

    mode: str

    async def create(self) -> Sandbox:
        """A fresh box."""

    async def restore(self, snapshot_id: str) -> Sandbox:
        """A fresh box whose files are those of the snapshot."""

    async def reap(self) -> int:
        """Remove boxes whose owner is gone; returns how many (case X17)."""


class ToolResult(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What a call gave back, the gateway's decision about it, and where it came from."""

    content: str
    decision: str
    ok: bool = True
    source: str = ""
    trusted: bool = False


class ToolGateway(Protocol):
    """The only way to a tool. Deny by default; away, slow or undecided means the call does not happen."""

    async def call(self, tool_call: ToolCall, key: str) -> ToolResult:
        """Decide and perhaps run. The same key attaches to or returns the first result (P25)."""


# --- inference --------------------------------------------------------------------------------------------------------


class TokenGenerator(Protocol):
    """Continues token ids under a committed version: what an episode sees of an engine or of a whole pool."""

    async def generate(self, request: GenerationRequest) -> Generation:
        """Sample under `request.version`. Cancelling the call cancels the request.

        Raises:
            VersionUnavailable: the version is not held.
            DeadlineExceeded: `request.deadline_s` passed.
            EngineDead: the engine is gone.
        """

    async def release(self, session: str) -> None:
        """The episode samples no further (P19): its cached keys and values may go. Safe for an unknown session."""

    def versions(self) -> Sequence[int]:
        """The versions that can be asked for now, oldest first."""


class InferenceEngine(TokenGenerator, Protocol):
    """One engine in one process. Holds one or more versions at once."""

    async def load(self, manifest: VersionManifest, path: str) -> None:
        """Take up a version from the folder `path`. On failure the engine serves exactly what it served before."""

    async def retire(self, version: int) -> None:
        """Drop a version once its running requests are done."""

    async def close(self) -> None:
        """End running requests with EngineDead and release everything."""


# --- delivery ---------------------------------------------------------------------------------------------------------


class Ledger(Protocol):
    """Queue and head in one place: every method is one atomic step (P4), and time is the server's (P12)."""

    async def admit(self, version: int, size: int, groups: int) -> Admission:
        """Reserve room for up to `groups` groups of `size` that will be played with `version` (P19, P20)."""

    async def put(self, submissions: Sequence[Submission]) -> Sequence[PutReply]:
        """End attempts. Never blocks for an admitted one; the same as one call each (case Q15)."""

    async def lease(self, fence: int, parent: int, ahead: int, count: int) -> Sequence[LeasedGroup]:
        """`count` ready groups, oldest first, or none at all (P20). Evicts what is over the lag limit against
        `parent` plus `ahead` unpublished batches. Raises Fenced."""

    async def extend(self, fence: int, groups: Sequence[int]) -> None:
        """Renew the leases. Raises Fenced."""

    async def release(self, fence: int, groups: Sequence[int]) -> None:
        """Give leased groups back to the queue. Raises Fenced."""

    async def drop(self, fence: int, groups: Sequence[int], reason: str) -> None:
        """Drop leased groups for a reason that the learner found. Raises Fenced."""

    async def acquire_learner(self, holder: str) -> int:
        """Become the learner: a new fence, and every lease of the old one is released."""

    async def stage(self, fence: int) -> int:
        """Reserve a version number, never used before (P6). Raises Fenced."""

    async def commit(self, request: CommitRequest) -> None:
        """Publish (P5, P7); the first version has parent -1. The same commit again is fine.

        Raises:
            Fenced: another learner holds the run, or it was stopped.
            CommitRefused: a precondition of P7 does not hold.
        """

    async def settle(self, fence: int, version: int) -> None:
        """A complete checkpoint of `version` exists: consumption by its ancestors is final (P5)."""

    async def rollback(self, fence: int, version: int) -> None:
        """Make the settled `version` the head again; what later versions consumed comes again (P6)."""

    async def watch_head(self, after: int | None, timeout_s: float) -> int | None:
        """Wait until the committed head is not `after`; returns the head then, or at the end of the time."""

    async def stop(self, reason: str) -> None:
        """Close the books for good: admit nothing more, and leave nothing in flight.

        What is open is cancelled; what is ready or leased is dropped; what was consumed stays. The run is taken from
        its learner: whatever it still tries raises Fenced. Only `acquire_learner` and `rollback` go on from here.
        """

    async def cancelled(self, groups: Sequence[int]) -> Sequence[CancelNotice]:
        """Which of these running groups should be abandoned, and why."""

    async def stats(self) -> LedgerStats:
        """Counts, from one atomic step."""

    async def fates(self, after: int, limit: int) -> tuple[Sequence[FateRow], int]:
        """Fates decided after position `after`, oldest first, at most `limit`, and the position of the last one
        (`after` when there is none); forgets what lies at or before `after`. The first position is 1.

        An attempt that ends gets its row in the same step (P3); one that a rollback queues again gets an IN_FLIGHT
        row. What nobody reads is bounded: the oldest rows go, and the positions show the gap.

        Raises:
            LedgerError: `limit` is below 1, or `after` lies past the end.
        """

    async def close(self) -> None:
        """Release connections."""


class VersionRegistry(Protocol):
    """Blobs, pins and watching. A version exists when its manifest does (P8)."""

    async def stage(self, number: int, fence: int, files: Mapping[str, bytes]) -> tuple[str, dict[str, str], str]:
        """Write a version's files under a path that contains the fence; returns path, hash by file, content hash."""

    async def manifest(self, manifest: VersionManifest) -> None:
        """Create the manifest, exclusively and last. Raises RegistryError when the number is taken by another."""

    async def open(self, version: int) -> tuple[VersionManifest, str]:
        """The manifest and a local folder whose files match its hashes. Raises RegistryError, NotFound."""

    async def latest(self) -> VersionManifest | None:
        """The newest manifest."""

    async def watch(self, after: int, timeout_s: float) -> VersionManifest | None:
        """Wait for a *committed* version above `after`; None when the time is over."""

    async def pin(self, version: int, holder: str, ttl_s: float) -> None:
        """Keep a version from being removed. Raises NotFound when it is already gone."""

    async def unpin(self, version: int, holder: str) -> None:
        """Give a pin back; safe when there is none."""

    async def retain(self, keep: Sequence[int], newest: int) -> Sequence[int]:
        """Remove versions that are not among `keep`, the `newest` ones, or pinned; returns those removed."""


# --- learning ---------------------------------------------------------------------------------------------------------


class ScoredEpisode(msgspec.Struct, frozen=True, gc=False):
    """An episode with the scalar reward that its valid components add up to."""

    episode: Episode
    score: float


class Algorithm(Protocol):
    """Credit: from a group of scored episodes to one advantage per policy turn, and the loss that uses them."""

    name: str
    needs_variance: bool

    def advantages(self, group: Sequence[ScoredEpisode]) -> Sequence[Sequence[float]]:
        """For each episode, one advantage per policy turn. Raises ValueError for unequal seeds in a group."""

    def loss(self, logprobs: Any, batch: Any) -> Any:
        """A scalar loss and its statistics, from learner logprobs and a batch (see trainer/batch.py)."""


class LearnerBackend(Protocol):
    """Holds the trainable weights. Every rank makes the same calls in the same order."""

    def step(self, batch: Any, algorithm: Algorithm) -> Mapping[str, float]:
        """One optimizer step; returns statistics. Raises ArithmeticError for a loss that is not finite."""

    def logprobs(self, batch: Any) -> Sequence[F32]:
        """Logprobs of each sample's tokens under the present weights."""

    def weights(self) -> Mapping[str, bytes]:
        """The files of a Hugging Face folder that holds the present weights."""

    def save(self) -> Mapping[str, bytes]:
        """Everything a resume needs: weights, optimizer, random states."""

    def restore(self, files: Mapping[str, bytes]) -> None:
        """Take up what `save` returned."""


Clock = Callable[[], float]
