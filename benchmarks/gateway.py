"""What a tool call costs with the gateway between policy and environment, above a bare round trip between processes.

The gateway is the product's own process, reached over its unix socket by the product's client, with audit mode `group`
and every decision on: a JSON Schema, a grant with paths, argument patterns, allow lists of commands and domains, taint,
budgets. A call is what the guard of an environment makes of it: `decide`, and `settle` with what the tool gave. Reads
are neither waited for on disk nor in their settling; writes have their intent and their result on disk (P25).

- `floor`: a process that answers each message with one as large as the gateway's answer; requests are as large as what
  a call sends. It uses the same asyncio protocol with the same gathering of what one tick of the loop sends.
- `gateway, read` and `gateway, write`: as above.

A figure is the CPU time of both processes, all their threads, per call; `client` and `server` are its parts. No two
calls of a round have the same arguments or outputs: what was computed for one episode helps no other. Rounds of floor
and gateway take turns; the episodes of one round run at once, `CALLS` calls each, after a first call that opens them.
`above` is the median of the pairwise differences. Flat: CPU per call with 4,096 episodes at once over that with 64.
"""

import argparse
import asyncio
import multiprocessing
import statistics
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
from common import Row, cpu_s, result, row_of, table
from transport_systems import server_cpu_s

from headrace import __version__
from headrace.actors.gateway.client import GatewayClient
from headrace.actors.gateway.framing import Wire, encode
from headrace.actors.gateway.policy import CallBudgets, Policy, Rule
from headrace.actors.gateway.protocol import Decide, Settle, Verdicts
from headrace.actors.gateway.start import open_gateway
from headrace.platform.config.gateway import GatewayConfig
from headrace.platform.contracts import CallVerdict, ToolOutput, ToolSession
from headrace.platform.records.message import ToolCall, ToolSpec
from headrace.platform.records.permissions import Grant
from headrace.platform.records.status import Capability, SideEffectTier

Samples = dict[tuple[str, int], list[tuple[float, float]]]
"""Of client and server, by system and number of episodes at once."""
TARGET_US, FLAT_TARGET = 100.0, 1.3
UNIT = "us CPU per call"
FLOOR, READ, WRITE = "floor", "gateway, read", "gateway, write"
LEVELS = (1, 64, 512, 4096)
WRITE_LEVELS = (1, 64)
CALLS = 8
FEWEST = 2048
_FORK = multiprocessing.get_context("fork")

_PARAMETERS = {
    "type": "object",
    "properties": {"path": {"type": "string", "maxLength": 200}, "pattern": {"type": "string"}},
    "required": ["path"],
    "additionalProperties": False,
}
TOOLS = (
    ToolSpec("search_file", "Search a file.", _PARAMETERS, reads={"path": "path", "pattern": "text"}),
    ToolSpec("touch_file", "Write.", _PARAMETERS, Capability.WRITE, SideEffectTier.WRITE, {"path": "path"}),
)
POLICY = Policy(
    grants=(Grant(Capability.READ, paths=("notes/*", "src/*")), Grant(Capability.WRITE, paths=("notes/*",))),
    rules=(Rule("no-keys", argument="path", matches=r"\.(pem|key)$"), Rule("no-dotenv", matches=r"\.env\b")),
    commands_allow=("ls", "cat", "git"),
    domains=("example.org", "*.example.org"),
    taint=(Capability.NETWORK, Capability.SECRET, Capability.IRREVERSIBLE),
    budgets=CallBudgets(calls=1_000_000, writes=1_000_000, money=1e9),
)
TASK = ("Find out in the notes of the project who is to be told about the release of the second version.",)
_LINE = "line {}: the quick brown fox of release {} jumps over the lazy dog, and nobody is told.\n"


def arguments_of(number: int) -> dict[str, Any]:
    """Those of a call, all different."""
    return {"path": f"notes/2026/release-{number:06}.md", "pattern": "who is to be told about the release"}


def output_of(number: int) -> str:
    """About half a KiB."""
    return "".join([_LINE.format(line, number) for line in range(6)])


class Echo(msgspec.Struct, frozen=True, array_like=True):
    """The floor's message."""

    seq: int
    body: bytes


class _EchoServer(Wire):
    def __init__(self, body: bytes) -> None:
        super().__init__(msgspec.msgpack.Decoder(Echo).decode, asyncio.get_running_loop())
        self._body = body

    def received(self, message: Echo) -> None:
        self.send(Echo(message.seq, self._body))


class _EchoClient(Wire):
    def __init__(self, body: bytes) -> None:
        super().__init__(msgspec.msgpack.Decoder(Echo).decode, asyncio.get_running_loop())
        self._body, self._seq = body, 0
        self._waiting: dict[int, asyncio.Future[Echo]] = {}

    async def ask(self) -> Echo:
        self._seq += 1
        answer = self._waiting[self._seq] = self._loop.create_future()
        self.send(Echo(self._seq, self._body))
        return await answer

    def received(self, message: Echo) -> None:
        self._waiting.pop(message.seq).set_result(message)


def frame_bytes() -> tuple[int, int]:
    """How much a call sends, and gets."""
    decide = Decide(100_000, 1000, "attempt/0/12", (ToolCall(TOOLS[0].name, arguments_of(1), "call-1"),))
    settle = Settle(0, 1000, "attempt/0/12", (ToolOutput(output_of(1)),))
    sent = len(encode(decide)) + 4 + len(encode(settle))
    return sent, len(encode(Verdicts(100_000, (CallVerdict(),))))


def serve_echo(path: str, size: int, ready: Any) -> None:
    """The floor's process."""

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_unix_server(lambda: _EchoServer(bytes(size)), path)
        ready.set()
        await server.serve_forever()

    asyncio.run(serve())


class Floor:
    """Round trips."""

    def __init__(self, wire: _EchoClient, pid: int) -> None:
        self._wire, self.pid = wire, pid

    async def episodes(self, count: int) -> list[Callable[[int], Awaitable[Any]]]:
        """What each of them does for a call."""

        async def call(number: int) -> None:
            await self._wire.ask()

        return [call] * count

    async def end(self) -> None:
        """After a round."""


class Gateway:
    """Calls of one of the tools."""

    def __init__(self, client: GatewayClient, pid: int, tool: ToolSpec) -> None:
        self._client, self.pid, self._tool = client, pid, tool
        self._begun = 0
        self._sessions: list[ToolSession] = []

    async def episodes(self, count: int) -> list[Callable[[int], Awaitable[Any]]]:
        """See `Floor`."""
        first = self._begun
        self._begun += count
        self._sessions = [
            self._client.session(f"run/{self._tool.name}-{first + number}/0#0", POLICY, TOOLS, (), TASK)
            for number in range(count)
        ]
        return [self._caller(session, (first + number) * 16) for number, session in enumerate(self._sessions)]

    def _caller(self, session: ToolSession, first: int) -> Callable[[int], Awaitable[Any]]:
        calls = [ToolCall(self._tool.name, arguments_of(first + number), "call-1") for number in range(CALLS + 1)]
        outputs = [ToolOutput(output_of(first + number)) for number in range(CALLS + 1)]

        async def call(number: int) -> None:
            key = f"attempt/0/{number}"
            verdicts = await session.decide((calls[number],), key)
            assert verdicts[0].result is None, verdicts[0].result
            await session.settle((outputs[number],), key)

        return call

    async def end(self) -> None:
        """See `Floor`."""
        for audited in await asyncio.gather(*[session.close() for session in self._sessions]):
            assert audited.safety.violations == 0


async def round_of(system: Floor | Gateway, level: int, calls: int) -> tuple[float, float]:
    """Microseconds of CPU per call with `level` episodes at once, of this process and of the other."""
    client = server = 0.0
    made = 0
    while made < calls:
        episodes = await system.episodes(level)
        await asyncio.gather(*[call(0) for call in episodes])
        before = cpu_s(), server_cpu_s(system.pid)
        await asyncio.gather(*[_episode(call) for call in episodes])
        client += cpu_s() - before[0]
        server += server_cpu_s(system.pid) - before[1]
        made += level * CALLS
        await system.end()
    return client / made * 1e6, server / made * 1e6


async def _episode(call: Callable[[int], Awaitable[Any]]) -> None:
    for number in range(1, CALLS + 1):
        await call(number)


async def measure(folder: Path, repeats: int, calls: int) -> Samples:
    """Take turns."""
    sent, got = frame_bytes()
    path = str(folder / "echo")
    ready = _FORK.Event()
    echo = _FORK.Process(target=serve_echo, args=(path, got, ready), daemon=True)
    echo.start()
    assert echo.pid is not None
    client = await open_gateway(folder / "home", folder / "audit", GatewayConfig())
    try:
        await asyncio.to_thread(ready.wait)
        loop = asyncio.get_running_loop()
        _, wire = await loop.create_unix_connection(lambda: _EchoClient(bytes(sent)), path)
        pid = int((folder / "home" / "pid").read_text())
        systems = {
            FLOOR: Floor(wire, echo.pid),
            READ: Gateway(client, pid, TOOLS[0]),
            WRITE: Gateway(client, pid, TOOLS[1]),
        }
        samples: Samples = {}
        for repeat in range(repeats + 1):
            for level in LEVELS:
                for name, system in systems.items():
                    if name == WRITE and level not in WRITE_LEVELS:
                        continue
                    cost = await round_of(system, level, calls if name != WRITE else calls // 4)
                    if repeat:  # the first one warms up
                        samples.setdefault((name, level), []).append(cost)
        wire.end()
    finally:
        await client.close()
        echo.kill()
        echo.join()
    return samples


def sums(parts: list[tuple[float, float]]) -> list[float]:
    """Of both processes."""
    return [client + server for client, server in parts]


def differences(these: list[tuple[float, float]], those: list[tuple[float, float]]) -> float:
    """The median of the pairwise differences: neighbours in time share the machine's mood."""
    return round(statistics.median(this - that for this, that in zip(sums(these), sums(those), strict=True)), 1)


def rows_of(samples: Samples) -> list[Row]:
    """One for each system and level."""
    rows = []
    for (name, level), costs in samples.items():
        client, server = [round(statistics.median(each), 1) for each in zip(*costs, strict=True)]
        extra: dict[str, object] = {"episodes": level, "client": client, "server": server}
        if name != FLOOR:
            extra |= {"above": differences(costs, samples[FLOOR, level]), "audit": "group"}
        rows.append(row_of(name, "asyncio" if name == FLOOR else __version__, UNIT, sums(costs), **extra))
    return rows


def main() -> None:
    """Measure, print a table, and with --json one object on the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--calls", type=int, default=FEWEST, help="at least so many per round")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        samples = asyncio.run(measure(Path(folder), arguments.repeats, arguments.calls))
    above = {level: differences(samples[READ, level], samples[FLOOR, level]) for level in LEVELS}
    flat = statistics.median(
        many / few for many, few in zip(sums(samples[READ, LEVELS[-1]]), sums(samples[READ, LEVELS[1]]), strict=True)
    )
    most, holds = max(above.values()), max(above.values()) <= TARGET_US and flat <= FLAT_TARGET
    rows = rows_of(samples)
    sys.stdout.write(table(rows) + "\n")
    sys.stdout.write(f"above the floor, us: {above}  4,096 episodes over 64: {flat:.3f}\n")
    if arguments.json:
        sent, got = frame_bytes()
        figures = {
            "unit": "us CPU per call above the floor, reads, the most of all levels",
            "audit": "group",
            "above": {str(level): figure for level, figure in above.items()},
            "flat": round(flat, 3),
            "flat_target": FLAT_TARGET,
            "bytes_sent": sent,
            "bytes_got": got,
        }
        sys.stdout.write(result("gateway", most, TARGET_US, holds, rows, **figures) + "\n")


if __name__ == "__main__":
    main()
