"""What performs the calls of one mount, and what it says when it cannot.

An error of a tool is an answer to the model: `ToolFailed`. A call that must not be made, for a reason that shows only
now, is `Refused`; one that was begun and must not go on is `Stopped`. Whatever else is raised means that nobody knows
whether the call happened.
"""

from difflib import get_close_matches
from typing import Protocol, TypeVar

import msgspec

from headrace.actors.gateway.decisions.asked import Asked, Denial, EpisodeState
from headrace.actors.gateway.policy import Mount
from headrace.platform.contracts import ToolOutput
from headrace.platform.errors import ConfigError
from headrace.platform.records.message import ToolSpec

Args = TypeVar("Args", bound=msgspec.Struct)


class ToolFailed(Exception):
    """The call failed, and it is known how: the message is the answer to the model."""


class Refused(ToolFailed):
    """The call may not be made after all. `denial` says by which rule; nothing has happened."""

    def __init__(self, denial: Denial) -> None:
        super().__init__(denial.told)
        self.denial = denial


class Stopped(ToolFailed):
    """The call was begun, and may not go on. `denial` says by which rule; what it did so far stays."""

    def __init__(self, denial: Denial) -> None:
        super().__init__(denial.told)
        self.denial = denial


class Performer(Protocol):
    """Performs the tools of one mount, for all episodes that have it.

    `specs` are its tools by the names that the model uses.
    """

    specs: dict[str, ToolSpec]

    async def perform(self, asked: Asked, state: EpisodeState) -> ToolOutput:
        """Make an allowed call. The caller sets a deadline, and cancels.

        Raises:
            ToolFailed: it failed, and it is known how; the message is for the model. Refused and Stopped: by a rule.
            InfrastructureFault: what the tool stands on is gone.
        """

    async def end(self, scope: str) -> None:
        """An episode is over: let go of what was held for it alone. An unknown one is passed over."""

    async def close(self) -> None:
        """Let go of everything. Safe to call twice."""


def read_args(mount: Mount, kind: type[Args]) -> Args:
    """The `args` of a mount.

    Raises:
        ConfigError: one is unknown, missing or of the wrong type; the message names it.
    """
    known = [field.name for field in msgspec.structs.fields(kind)]
    for name in mount.args:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
            raise ConfigError(f"tools: {mount.kind}: args.{name} is unknown; {hint}")
    try:
        return msgspec.convert(mount.args, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"tools: {mount.kind}: args: {str(error).replace('`$.', '`args.')}") from None
