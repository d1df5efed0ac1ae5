"""Sandboxes, and the one way to a tool."""

from typing import Protocol

import msgspec

from headrace.platform.records.message import (
    ToolCall,
)


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
