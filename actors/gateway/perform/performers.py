"""All tools that the gateway performs itself, by mount; equal mounts are built once and shared by episodes.

Owns which performer a call goes to, what is held for an episode, and that no secret of a mount is in what a tool says.
What no episode uses stays for the next one, up to a number; beyond it, what was used longest ago is let go. Deadlines,
and what becomes of failures, are left to `performing`; kinds are loaded when a mount needs them.
"""

import asyncio
import importlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from headrace.actors.gateway.boxed import KINDS as BOXED_KINDS
from headrace.actors.gateway.decisions import output
from headrace.actors.gateway.decisions.asked import Asked, EpisodeState
from headrace.actors.gateway.perform.connector import Connector, DirectConnector, Resolver, resolve_name
from headrace.actors.gateway.perform.performer import Performer, Refused, Stopped, ToolFailed
from headrace.actors.gateway.perform.proxy import EgressProxy
from headrace.actors.gateway.policy import Mount
from headrace.platform.contracts import ToolOutput
from headrace.platform.errors import ConfigError
from headrace.platform.records.message import ToolSpec

if TYPE_CHECKING:  # with it comes all of the configuration, which a gateway without such mounts does not need
    from headrace.platform.config.secret_references import SecretValues

__all__ = ["Performers", "Refused", "Stopped", "ToolFailed"]
_encode = msgspec.msgpack.Encoder(order="deterministic").encode
_KINDS = ("http", "search", "mcp")
_MOST_UNUSED = 32
"""Performers, and policies, that no episode uses."""


@dataclass(slots=True)
class _Use:
    """A policy: its mounts' keys, the performers of its tools by name, and the scopes of the episodes that called."""

    keys: tuple[bytes, ...]
    tools: dict[str, Performer] = field(default_factory=dict)
    scopes: set[str] = field(default_factory=set)


class Performers:
    """The performers of a gateway process.

    Args:
        connector: opens what the proxy may reach.
        resolver: looks names up for it.
        env: where `${env:NAME}` is read.
    """

    def __init__(
        self,
        connector: Connector | None = None,
        resolver: Resolver = resolve_name,
        env: Mapping[str, str] = os.environ,
    ) -> None:
        self._env = env
        self._proxy = EgressProxy(connector or DirectConnector(), resolver)
        self._secrets: SecretValues | None = None
        self._made: dict[bytes, asyncio.Task[Performer]] = {}  # this and the next: what was used longest ago first
        self._uses: dict[str, _Use] = {}

    async def mount(self, mounts: Sequence[Mount]) -> dict[str, tuple[Performer, ToolSpec]]:
        """The tools of mounts, by name; those of boxed mounts are not among them.

        Raises:
            ConfigError: a mount has arguments that its kind does not know, or two tools have one name.
            GatewayAway: a server of tools did not come up.
        """
        found: dict[str, tuple[Performer, ToolSpec]] = {}
        for mount in mounts:
            if mount.kind in BOXED_KINDS:
                continue
            performer = await self._performer(mount)
            for name, spec in performer.specs.items():
                if name in found:
                    raise ConfigError(f"tools: two are called {name!r}; give one of them a `name`")
                found[name] = performer, spec
        await self._let_go()
        return found

    async def perform(self, asked: Asked, state: EpisodeState) -> ToolOutput:
        """Make an allowed call; what it gave, without the secrets of any mount.

        Raises:
            ToolFailed: the message is the answer.
            Refused, Stopped: it was not made, or did not go on, by a rule.
            InfrastructureFault: what the tool stands on is gone.
        """
        use = self._used(state)
        if not use.tools:
            made = await self.mount(state.policy.mounts)
            use.tools = {name: performer for name, (performer, _) in made.items()}
        try:
            given = await use.tools[asked.call.name].perform(asked, state)
        except Refused:
            raise
        except Stopped as stopped:
            raise Stopped(msgspec.structs.replace(stopped.denial, told=self._redacted(str(stopped)))) from stopped
        except ToolFailed as error:
            raise ToolFailed(self._redacted(str(error))) from error
        return ToolOutput(self._redacted(given.content), given.ok)

    async def end(self, scope: str) -> None:
        """An episode is over: its credential is worth nothing from now on, and its servers of tools end."""
        for use in self._uses.values():
            use.scopes.discard(scope)
        await asyncio.gather(*[performer.end(scope) for performer in self._ready()])
        await self._let_go()

    async def close(self) -> None:
        """End all. Safe to call twice."""
        for task in self._made.values():
            task.cancel()
        await asyncio.gather(*self._made.values(), return_exceptions=True)
        await asyncio.gather(*[performer.close() for performer in self._ready()])
        self._made.clear()
        self._uses.clear()
        await self._proxy.close()

    def _used(self, state: EpisodeState) -> _Use:
        """The use of a policy, by one more episode: nothing of it is let go before that ends."""
        policy = state.policy
        use = self._uses.pop(policy.digest, None)
        if use is None:
            use = _Use(tuple(_encode(mount) for mount in policy.mounts))
        self._uses[policy.digest] = use
        use.scopes.add(state.scope)
        return use

    async def _let_go(self) -> None:
        """Of what no episode uses, all but the last ones."""
        unused = [digest for digest, use in self._uses.items() if not use.scopes]
        for digest in unused[:-_MOST_UNUSED]:
            del self._uses[digest]
        kept = {key for use in self._uses.values() for key in use.keys}
        idle = [key for key, task in self._made.items() if key not in kept and task.done()]
        gone = [self._made.pop(key) for key in idle[:-_MOST_UNUSED]]
        await asyncio.gather(*[performer.close() for performer in _results(gone)])

    async def _performer(self, mount: Mount) -> Performer:
        key = _encode(mount)
        if (task := self._made.pop(key, None)) is None:
            task = asyncio.get_running_loop().create_task(self._make(mount))
        self._made[key] = task
        try:
            return await asyncio.shield(task)
        except Exception:
            if self._made.get(key) is task:  # the next who needs it tries again
                del self._made[key]
            raise

    async def _make(self, mount: Mount) -> Performer:
        if mount.kind not in _KINDS:
            raise ConfigError(f"tools: there is no kind {mount.kind!r}; there are {', '.join(_KINDS)}")
        if mount.kind == "http":
            await _load("httpx2")
            from headrace.actors.gateway.perform.http_tool import HttpTool

            return await HttpTool.make(mount, self._proxy, self._known_secrets(), self._env)
        if mount.kind == "mcp":
            await _load("mcp")
            from headrace.actors.gateway.perform.mcp_tool import McpTool

            return await McpTool.make(mount, self._known_secrets(), self._env)
        from headrace.actors.gateway.perform.search_tool import SearchTool

        return await SearchTool.make(mount)

    def _ready(self) -> list[Performer]:
        return _results(self._made.values())

    def _known_secrets(self) -> "SecretValues":
        if self._secrets is None:
            from headrace.platform.config.secret_references import SecretValues

            self._secrets = SecretValues()
        return self._secrets

    def _redacted(self, text: str) -> str:
        """Neutralised first: taking an escape sequence out may put a secret together."""
        return output.redacted(output.neutralised(text), sorted(self._secrets)) if self._secrets else text


def _results(tasks: Iterable[asyncio.Task[Performer]]) -> list[Performer]:
    return [task.result() for task in tasks if task.done() and not task.cancelled() and task.exception() is None]


async def _load(library: str) -> None:
    """Import what takes long beside the loop. Raises ConfigError where it is not installed."""
    try:
        await asyncio.to_thread(importlib.import_module, library)
    except ModuleNotFoundError as error:
        mend = "pip install 'headrace[mcp]'" if library == "mcp" else f"pip install {library}"
        raise ConfigError(f"tools: {error.name} is not installed; run: {mend}") from None
