"""Built-in tools that run in the episode's sandbox: `shell`, `files` and `python`.

The gateway decides on their calls; whoever holds the box performs them. A mount becomes one tool, or several.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import msgspec

from headrace.actors.gateway.boxed import files, python, shell
from headrace.actors.gateway.policy import Mount
from headrace.platform.contracts import Sandbox, ToolOutput
from headrace.platform.errors import ConfigError
from headrace.platform.records.message import ToolCall, ToolSpec

Perform = Callable[[Sandbox, dict[str, object], float], Awaitable[ToolOutput]]
_LEAST_S = 0.5
_KINDS: dict[str, Sequence[tuple[ToolSpec, Perform]]] = {
    "shell": shell.TOOLS,
    "files": files.TOOLS,
    "python": python.TOOLS,
}
KINDS = frozenset(_KINDS)
"""The kinds of mounts that run in a box."""


@dataclass(frozen=True, slots=True)
class BoxedTools:
    """The boxed tools of a policy: their specs by name, and how each is performed."""

    specs: dict[str, ToolSpec]
    _performs: dict[str, Perform]

    async def perform(self, box: Sandbox, call: ToolCall, within_s: float) -> ToolOutput:
        """Do what an allowed call asks for, in what is left of the turn: a command that outruns it is told so (P27).
        Raises SandboxDied; a command that fails is an output that is not ok."""
        if within_s < _LEAST_S:
            return ToolOutput("[not done: the calls before it have used up the time of this turn]", ok=False)
        return await self._performs[call.name](box, call.arguments, within_s)


def boxed_tools(mounts: Sequence[Mount]) -> BoxedTools:
    """Those of `mounts` that run in a box.

    Raises:
        ConfigError: two tools have one name, or a mount has arguments that its kind does not know.
    """
    specs: dict[str, ToolSpec] = {}
    performs: dict[str, Perform] = {}
    for mount in mounts:
        if mount.kind not in _KINDS:
            continue
        if mount.args:
            raise ConfigError(f"tools: {mount.kind} takes no args, but has {', '.join(mount.args)}")
        tools = _KINDS[mount.kind]
        for spec, perform in tools:
            named = mounted_spec(spec, mount, alone=len(tools) == 1)
            if named.name in specs:
                raise ConfigError(f"tools: two are called {named.name!r}; give one of them a `name`")
            specs[named.name], performs[named.name] = named, perform
    return BoxedTools(specs, performs)


def mounted_spec(spec: ToolSpec, mount: Mount, alone: bool) -> ToolSpec:
    """`spec` under the name and with the capability that a recipe gives it. `alone`: the mount is one tool, which takes
    the mount's name; of several it is the prefix."""
    name = spec.name
    if mount.name:
        name = mount.name if alone else f"{mount.name}_{spec.name}"
    return msgspec.structs.replace(spec, name=name, capability=mount.capability or spec.capability)
