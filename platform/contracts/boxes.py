"""Sandboxes, and the one way to a tool."""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from headrace.platform.records.message import ToolCall
from headrace.platform.records.permissions import UNSAID, Safety
from headrace.platform.records.status import SideEffectTier


class CommandResult(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What a command left: its exit code (None when it was killed), bounded output, and which limit ended it.

    `limit` is empty, or one of "time" (the command's own limit), "silence" (it printed nothing for too long), "memory"
    and "disk" (the box's limits). `output` is standard output and error as they came, decoded as UTF-8 with invalid
    bytes replaced (case X10); beyond the limit on output the middle is left out and `truncated_bytes` says how much.
    """

    exit_code: int | None
    output: str
    truncated_bytes: int = 0
    limit: str = ""
    seconds: float = 0.0


class BoxLimits(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What one box may use. Sizes in MiB; `cpu_s` are seconds of processor time of one process."""

    memory_mb: int = 512
    cpus: float = 1.0
    cpu_s: int = 600
    pids: int = 64
    file_mb: int = 64
    disk_mb: int = 256
    output_kb: int = 64
    silence_s: float = 60.0


class Sandbox(Protocol):
    """One box, already running: a shell that lives as long as it, whose working directory and exported variables last.

    Owned by whoever created it; `close` is safe to call twice. Calls never overlap. A box that is gone, killed or over
    its disk or memory raises SandboxDied from every call but `close`, at once (case E13).

    `workspace` is the path of its workspace, as commands name it.
    """

    sandbox_id: str
    workspace: str

    async def run(self, command: str, timeout_s: float, silence_s: float | None = None) -> CommandResult:
        """Run in the box's shell. A command that outruns its limit, or says nothing for `silence_s` (the box's limit
        where None), is killed with all that it started, and is a result, not an error (P27, case X9); the shell, its
        directory and its variables are as before the command.

        Raises:
            SandboxDied: the box is gone.
        """

    async def read(self, path: str) -> bytes:
        """A file's bytes; relative paths begin at the workspace. Reads as the box sees it: a link leads nowhere else.

        Raises:
            FileNotFoundError: there is no such file.
            OSError: it is no file, or larger than the box's limit on files.
            SandboxDied: the box is gone.
        """

    async def write(self, path: str, data: bytes) -> None:
        """Create or replace a file and the folders above it. Raises OSError and SandboxDied as `read`."""

    async def snapshot(self) -> str:
        """Keep workspace, /tmp, working directory and exported variables; an id for `SandboxProvider.restore`.

        Processes that commands left in the background are ended first: a snapshot has none.
        """

    async def close(self) -> None:
        """End every process in the box and release it."""


class SandboxProvider(Protocol):
    """Makes boxes. Refuses, rather than weakens, when it cannot isolate as declared.

    `mode` is how it isolates: one of "docker", "bubblewrap", "landlock" and "unsafe-process". `image_digest` names the
    root file system that its boxes see, empty where that is the host's.
    """

    mode: str
    image_digest: str

    async def create(self) -> Sandbox:
        """A fresh box. Waits while there are as many as may be (P21). Raises SandboxDied when it does not come up."""

    async def restore(self, snapshot_id: str) -> Sandbox:
        """A fresh box as it was at the snapshot. Raises KeyError for an unknown one, else as `create`."""

    async def discard(self, snapshot_id: str) -> None:
        """Forget a snapshot; boxes that were restored from it go on. An unknown one is passed over."""

    async def reap(self) -> int:
        """Remove what providers of dead processes left on this host; how many boxes that was (case X17)."""

    async def close(self) -> None:
        """Close every box, forget every snapshot. Safe to call twice."""


class ToolResult(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What a call gave back, the gateway's decision about it, and where it came from.

    `content` is bounded text in which nothing is a role marker or a special token. `decision` is "allow" or "deny",
    `rule` says which decision denied it, or, of one that was allowed, ended it on its way. `source` is where the
    content is from ("tool:http https://example.org/a", "gateway"); what is not `trusted` taints what derives from it.
    `invalid` marks a call that could not be made as it was written: a mistake of the model (MODEL_INVALID_ACTION).
    """

    content: str
    decision: str = "allow"
    ok: bool = True
    source: str = ""
    trusted: bool = False
    rule: str = ""
    invalid: bool = False


class CallVerdict(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The gateway's decision on one call.

    `result` is None where the call is allowed and whoever asked has to perform it and to `settle` it; it is there where
    the call was denied, or was performed by the gateway itself. `taint` names the untrusted sources that the arguments
    derive from. `lasting` marks what is not decided by the call alone (an answer from outside, an approval, a clock):
    a replay takes it from the record.
    """

    result: ToolResult | None = None
    tier: SideEffectTier = SideEffectTier.READ
    taint: tuple[str, ...] = ()
    lasting: bool = False


class ToolOutput(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What a call gave back where it was performed, as it came."""

    content: str
    ok: bool = True


class Audited(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What an episode's record keeps of its calls: head of the audit chain, counts, hash of the policy."""

    head: str = ""
    safety: Safety = UNSAID
    policy: str = ""


class ToolSession(Protocol):
    """The calls of one episode, one branch of it (P26). Deny by default, fail closed.

    A `key` is a turn's; the call with index i of the turn has the key "KEY/i". Errors of both methods mean that the
    call did not happen, or is in doubt, and end the episode.
    """

    async def decide(self, calls: Sequence[ToolCall], key: str) -> Sequence[CallVerdict]:
        """Decide on the calls of one turn, in order, and perform those that are the gateway's own.

        The same key and calls again give the same answer, without a second effect (P25).

        Raises:
            ValueError: the key belongs to other calls (P25).
            GatewayAway: it cannot be reached, or did not decide in time.
            InDoubt: an effect was begun under this key, and nobody knows how it ended (P25).
            SafetyBlock: the episode may not go on.
        """

    async def settle(self, outputs: Sequence[ToolOutput], key: str) -> Sequence[ToolResult]:
        """Tell what the allowed calls of a turn, which the caller has performed, gave back, in order; returns them as
        the model may see them. Where one of them is more than a read, this waits until the result is durable.

        Raises:
            GatewayAway: as `decide`.
        """

    def recorded(self, calls: Sequence[ToolCall]) -> None:
        """Tell of calls whose verdicts a replay took from the record: they are counted and spent as if they had been
        made, and what they gave is untrusted."""

    async def close(self) -> Audited:
        """The episode is over; its keys live on for a grace period (P26). Safe to call twice. Raises GatewayAway."""


class ToolGateway(Protocol):
    """The only way to a tool. Away, slow or undecided means that the call does not happen."""

    async def call(self, tool_call: ToolCall, key: str) -> ToolResult:
        """Decide and perhaps run. The same key attaches to or returns the first result (P25)."""
