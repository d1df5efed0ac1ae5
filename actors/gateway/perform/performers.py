"""All tools that the gateway performs itself, by mount; equal mounts are built once and shared by episodes.

Owns which performer a call goes to, what is held for an episode, and that no secret of a mount is in what a tool says.
Deadlines, and what becomes of failures, are left to `performing`; kinds are loaded when a mount needs them.
"""

import asyncio
import importlib
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from headrace.actors.gateway.boxed import KINDS as BOXED_KINDS
from headrace.actors.gateway.decisions import output
from headrace.actors.gateway.decisions.asked import Asked, EpisodeState
from headrace.actors.gateway.perform.connector import Connector, DirectConnector, Resolver, resolve_name
from headrace.actors.gateway.perform.performer import Performer, Refused, ToolFailed
from headrace.actors.gateway.perform.proxy import EgressProxy
from headrace.actors.gateway.policy import Mount
from headrace.platform.contracts import ToolOutput
from headrace.platform.errors import ConfigError
from headrace.platform.records.message import ToolSpec

if TYPE_CHECKING:  # with it comes all of the configuration, which a gateway without such mounts does not need
    from headrace.platform.config.secret_references import SecretValues

__all__ = ["Performers", "Refused", "ToolFailed"]
_encode = msgspec.msgpack.Encoder(order="deterministic").encode
_KINDS = ("http", "search", "mcp")


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
        self._made: dict[bytes, asyncio.Task[Performer]] = {}
        self._by_policy: dict[str, dict[str, Performer]] = {}

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
        return found

    async def perform(self, asked: Asked, state: EpisodeState) -> ToolOutput:
        """Make an allowed call; what it gave, without the secrets of any mount.

        Raises:
            ToolFailed: the message is the answer.
            Refused: it was not made, by a rule.
            InfrastructureFault: what the tool stands on is gone.
        """
        policy = state.policy
        if (tools := self._by_policy.get(policy.digest)) is None:
            made = await self.mount(policy.mounts)
            tools = self._by_policy[policy.digest] = {name: performer for name, (performer, _) in made.items()}
        try:
            given = await tools[asked.call.name].perform(asked, state)
        except Refused:
            raise
        except ToolFailed as error:
            raise ToolFailed(self._redacted(str(error))) from error
        return ToolOutput(self._redacted(given.content), given.ok)

    async def end(self, scope: str) -> None:
        """An episode is over: its credential is worth nothing from now on, and its servers of tools end."""
        await asyncio.gather(*[performer.end(scope) for performer in self._ready()])

    async def close(self) -> None:
        """End all. Safe to call twice."""
        for task in self._made.values():
            task.cancel()
        await asyncio.gather(*self._made.values(), return_exceptions=True)
        await asyncio.gather(*[performer.close() for performer in self._ready()])
        self._made.clear()
        self._by_policy.clear()
        await self._proxy.close()

    async def _performer(self, mount: Mount) -> Performer:
        key = _encode(mount)
        if (task := self._made.get(key)) is None:
            task = self._made[key] = asyncio.get_running_loop().create_task(self._make(mount))
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
        return [
            task.result()
            for task in self._made.values()
            if task.done() and not task.cancelled() and task.exception() is None
        ]

    def _known_secrets(self) -> "SecretValues":
        if self._secrets is None:
            from headrace.platform.config.secret_references import SecretValues

            self._secrets = SecretValues()
        return self._secrets

    def _redacted(self, text: str) -> str:
        """Neutralised first: taking an escape sequence out may put a secret together."""
        return output.redacted(output.neutralised(text), sorted(self._secrets)) if self._secrets else text


async def _load(library: str) -> None:
    """Import what takes long beside the loop. Raises ConfigError where it is not installed."""
    try:
        await asyncio.to_thread(importlib.import_module, library)
    except ModuleNotFoundError as error:
        mend = "pip install 'headrace[mcp]'" if library == "mcp" else f"pip install {library}"
        raise ConfigError(f"tools: {error.name} is not installed; run: {mend}") from None
