"""What would have left this host: a connector and a resolver that record, and reach nothing but fakes on loopback."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass
class RecordingConnector:
    """Records each address that is dialled, and connects to a server of the test in its place.

    Attributes:
        routes: ports of loopback, by address and port that are dialled. What is not there refuses the connection.
        dialled: every address and port that was asked for, in order.
    """

    routes: Mapping[tuple[str, int], int] = field(default_factory=dict)
    dialled: list[tuple[str, int]] = field(default_factory=list)

    async def connect(self, address: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection to the fake of an address. Raises ConnectionRefusedError where there is none."""
        self.dialled.append((address, port))
        local = self.routes.get((address, port))
        if local is None:
            raise ConnectionRefusedError(f"{address}:{port} has no fake")
        return await asyncio.open_connection("127.0.0.1", local)


@dataclass
class RecordingResolver:
    """Answers from a table, and records what was asked.

    Attributes:
        names: answers by host name, one for each time it is asked; the last one stays.
        asked: every name that was asked for, in order.
    """

    names: Mapping[str, Sequence[Sequence[str]]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        """The addresses of a host. Raises OSError for an unknown one."""
        self.asked.append(host)
        answers = self.names.get(host)
        if not answers:
            raise OSError(f"{host} is unknown")
        return answers[min(self.asked.count(host), len(answers)) - 1]
