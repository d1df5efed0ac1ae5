"""Gateways for tests: the parts of the process in this one, over a real socket, with tools that are plain functions."""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from headrace.actors.gateway.audit.log import AuditLog
from headrace.actors.gateway.client import GatewayClient
from headrace.actors.gateway.decisions.approvals import Approvals
from headrace.actors.gateway.home import Home
from headrace.actors.gateway.journal import Journal
from headrace.actors.gateway.judging import Judge
from headrace.actors.gateway.launch import Launch
from headrace.actors.gateway.performing import Performing
from headrace.actors.gateway.pipeline import Pipeline
from headrace.actors.gateway.policy import Mount, Policy
from headrace.actors.gateway.server import Server
from headrace.actors.gateway.sessions import Learned, Session, merged
from headrace.platform.config.gateway import GatewayConfig
from headrace.platform.contracts import ToolOutput
from headrace.platform.records import ToolSpec
from headrace.platform.records.permissions import Grant
from headrace.platform.records.status import Capability, SideEffectTier

WORD = {"type": "object", "properties": {"text": {"type": "string"}}}
GET = ToolSpec("get", parameters=WORD)
PUT = ToolSpec("put", parameters=WORD, capability=Capability.WRITE, tier=SideEffectTier.WRITE)
FETCH = ToolSpec("fetch", parameters=WORD, capability=Capability.NETWORK)
SEND = ToolSpec("send", parameters=WORD, capability=Capability.NETWORK, tier=SideEffectTier.IRREVERSIBLE)
OWN = (GET, PUT)
LOCAL_GRANTS = (Grant(Capability.READ), Grant(Capability.WRITE))
GRANTS = (*LOCAL_GRANTS, Grant(Capability.NETWORK), Grant(Capability.IRREVERSIBLE))
MOUNTS = (Mount("search", "tools"),)

Perform = Callable[[dict[str, Any]], Awaitable[str]]


class FunctionPerformers:
    """In place of `Performers`: each mount offers the same functions."""

    def __init__(self, tools: dict[str, tuple[ToolSpec, Perform]] | None = None) -> None:
        self.tools = tools or {}
        self.ended: list[str] = []
        self.closed = False

    async def mount(self, mounts):
        return {name: (self, spec) for name, (spec, _) in self.tools.items()} if mounts else {}

    async def perform(self, asked, state):
        return ToolOutput(await self.tools[asked.call.name][1](asked.call.arguments))

    async def end(self, scope):
        self.ended.append(scope)

    async def close(self):
        self.closed = True


class Parts:
    """A pipeline on real files; `restart` is what a crash and a new process leave of it."""

    def __init__(self, folder: Path, tools=None, *, each: bool = False, deadline_s: float = 5.0) -> None:
        self.folder, self.each, self.deadline_s = folder, each, deadline_s
        self.performers = FunctionPerformers(tools)
        self._begin()

    def _begin(self) -> None:
        home = self.folder / "home"
        home.mkdir(mode=0o700, exist_ok=True)
        self.journal = Journal(home, 0.01)
        self.audit = AuditLog(self.folder / "audit", 0.01, home)
        self.pipeline = Pipeline(
            self.audit,
            self.journal,
            Judge(Approvals(home), self.deadline_s / 2, time.monotonic),
            Performing(self.performers, self.deadline_s),
            each=self.each,
            clock=time.monotonic,
        )

    def session(self, policy: Policy | None = None, scope: str = "run/0/0#a", **changes: Any) -> Session:
        policy = policy or Policy(grants=GRANTS)
        here = {name: spec for name, (spec, _) in self.performers.tools.items()}
        learned = Learned(policy, merged(OWN, here), frozenset(here))
        return Session(scope, learned, policy.grants, (), "test", **changes)

    def restart(self) -> None:
        self.close()
        self._begin()

    def close(self) -> None:
        self.journal.close()
        self.audit.close()

    def entries(self) -> list[dict[str, Any]]:
        lines = [line for path in sorted((self.folder / "audit").iterdir()) for line in path.read_bytes().splitlines()]
        return [entry for entry in map(msgspec.json.decode, lines) if "kind" in entry]


@asynccontextmanager
async def listening(parts: Parts):
    """A server of these parts in the loop that runs; its home is as a process would leave it."""
    home = Home(parts.folder / "home")
    address, token = home.settle_in()
    server = Server(parts.pipeline, parts.performers, parts.journal, token, time.monotonic)
    listener = await asyncio.get_running_loop().create_unix_server(server.connection, address)
    try:
        yield server
    finally:
        listener.close()
        await server.finish(5.0)


def client_of(parts: Parts, **config: Any) -> GatewayClient:
    """A client that finds the server of these parts."""
    return GatewayClient(Launch(Home(parts.folder / "home"), parts.folder / "audit", GatewayConfig(**config)))


def new_scope() -> str:
    return f"run/0/0#{secrets.token_hex(4)}"
