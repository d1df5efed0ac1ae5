"""Hosts in this process, and a world that does whatever a message says."""

import asyncio
import contextlib
from concurrent.futures import ThreadPoolExecutor

from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from headrace import Message, Observation, ReplayedEnvironment, RewardComponent, RewardKind, Role, StepResult, Task
from headrace.actors.environments.adapter import as_async
from headrace.actors.remote.group_version import GroupVersion
from headrace.actors.remote.host import EnvironmentHost, HostSettings
from headrace.actors.remote.host_session import SessionLimits
from headrace.actors.remote.pools import EnvironmentPool
from headrace.actors.remote.protocol import decode, encode
from headrace.platform.config.pools import PoolConfig
from headrace.platform.errors import EnvironmentFault, InfrastructureFault, SandboxDied
from headrace.platform.hashing import hash_value
from headrace.platform.records.episode import Provenance

TASK = Task("t-0", "obedient", data={"word": "go"})
FAULTS = {
    "sandbox": SandboxDied("the box was killed"),
    "infrastructure": InfrastructureFault("no disk"),
    "transient": EnvironmentFault("try again"),
    "bug": EnvironmentFault("it is broken", transient=False),
    "key": KeyError("wall"),
    "time": TimeoutError("its own"),
    "exit": SystemExit(3),
}


class Obedient(ReplayedEnvironment):
    """Raises, hangs or ends when told to; else it echoes."""

    name = "obedient"

    def __init__(self, version="1", closed=None):
        self.version = version
        self._closed = closed if closed is not None else []

    def tools(self):
        return ()

    async def _reset(self, task, seed):
        self._said = []
        if task.data["word"] != "go":
            await self._obey(task.data["word"])
        return Observation((Message(Role.USER, "go"),), hash_value([seed]), {"seed": seed, "deep": {"é": [1, 2.5]}})

    async def _step(self, message):
        self._said.append(message.content)
        await self._obey(message.content)
        if message.content == "end":
            return StepResult(rewards=(RewardComponent(RewardKind.OUTCOME, 1.0),), terminated=True)
        if message.content == "surrogate":
            return StepResult((Message(Role.USER, "a\ud800b"),))
        if message.content == "long":
            return StepResult((Message(Role.USER, "x" * (33 * 2**20)),))
        meta = {"echo": message.content, "calls": [call.arguments for call in message.tool_calls]}
        return StepResult((Message(Role.USER, message.content),), state_hash=hash_value(self._said), metadata=meta)

    async def _obey(self, word):
        if word in FAULTS:
            raise FAULTS[word]
        if word == "hang":
            await asyncio.Event().wait()

    @property
    def provenance(self):
        return Provenance(sandbox_id="box-1", external={str(n): [said] for n, said in enumerate(self._said)})

    async def close(self):
        await super().close()
        self._closed.append(self)


class ObedientOffer:
    """An `Offer` of the class above. `made` is how many sessions there were, `closed` has those that were closed."""

    name, target, description = "obedient", "kit.py:Obedient", "Obeys."

    def __init__(self, version="1"):
        self.version = version
        self.made, self.closed = 0, []
        self.threads = ThreadPoolExecutor(4)

    def session(self):
        self.made += 1
        return as_async(Obedient(self.version, self.closed), self.threads)

    def task(self, number):
        return Task(f"t-{number}", "obedient", data={"word": "go"}), number

    async def close(self):
        self.threads.shutdown(wait=False)


@contextlib.asynccontextmanager
async def hosting(offer=None, idle_s=60.0, call_s=60.0, **settings):
    """A host on loopback, closed at the end."""
    limits = SessionLimits(idle_s=idle_s, call_s=call_s)
    host = EnvironmentHost(offer or ObedientOffer(), HostSettings(limits=limits, **settings))
    await host.start()
    try:
        yield host
    finally:
        await host.close()


def address_of(host):
    return f"ws://127.0.0.1:{host.port}"


@contextlib.asynccontextmanager
async def pooled(*hosts, environment="obedient", token="", args=None, **config):
    """A pool of hosts or addresses, closed at the end."""
    if hosts:
        config["hosts"] = [each if isinstance(each, str) else address_of(each) for each in hosts]
    pool = EnvironmentPool(PoolConfig.model_validate(config), environment, token, args)
    try:
        yield pool
    finally:
        await pool.close()


@contextlib.asynccontextmanager
async def session_at(*hosts, wait_s=5.0, step_s=60.0, **config):
    """A session of a pool of its own."""
    async with pooled(*hosts, **config) as pool:
        session = pool.session(GroupVersion(), wait_s, step_s)
        try:
            yield session
        finally:
            await session.close()


def say(text, *calls):
    return Message(Role.ASSISTANT, text, tool_calls=calls)


async def until(condition, seconds=10.0):
    """Wait for something that happens elsewhere in this event loop."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - it is others that make it true
            await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def plain(host, token=""):
    """A client that knows OpenEnv's messages only: `ask(kind, data)` gives the answer."""
    headers = {"Authorization": f"Bearer {token}"} if token else None
    async with connect(f"{address_of(host)}/ws", proxy=None, additional_headers=headers) as connection:

        async def ask(kind, data=None):
            with contextlib.suppress(ConnectionClosed):  # what it said before is still to be read
                await connection.send(encode({"type": kind, **({} if data is None else {"data": data})}), text=True)
            return decode(await connection.recv())

        ask.connection = connection
        yield ask
