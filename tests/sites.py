"""Web sites for tests: a server on loopback that stands for an address which the recording connector knows."""

import asyncio
import ssl
from contextlib import asynccontextmanager

from headrace.platform.testing.fakes.egress import RecordingConnector, RecordingResolver

PUBLIC = "93.184.215.14"
OTHER = "93.184.215.15"


class Site:
    """Answers each request with what `answers` has for its path; records what came.

    `heads` and `bodies` are those of the requests; an answer of None closes the connection instead.
    """

    def __init__(self, answers):
        self.answers, self.heads, self.bodies = answers, [], []
        self.connections = 0

    async def serve(self, reader, writer):
        self.connections += 1
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.heads.append(head)
            length = [
                int(line.split(":")[1]) for line in head.split("\r\n") if line.lower().startswith("content-length")
            ]
            self.bodies.append(await reader.readexactly(length[0]) if length else b"")
            answer = self.answers.get(head.split(" ")[1], answered(b"nothing here", status="404 Not Found"))
            if answer is not None:
                writer.write(answer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


def answered(body=b"", status="200 OK", **headers):
    """A response."""
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


def redirected(to, status="302 Found"):
    """A redirect."""
    return answered(b"", status, Location=to)


@asynccontextmanager
async def world(sites, names, tls: ssl.SSLContext | None = None):
    """A connector and a resolver for `sites`, by the address and port that they stand for, and `names`."""
    servers, routes = [], {}
    for place, site in sites.items():
        server = await asyncio.start_server(site.serve, "127.0.0.1", 0, ssl=tls if place[1] == 443 else None)
        servers.append(server)
        routes[place] = server.sockets[0].getsockname()[1]
    yield RecordingConnector(routes), RecordingResolver(names)
    for server in servers:
        server.close()
        await server.wait_closed()
