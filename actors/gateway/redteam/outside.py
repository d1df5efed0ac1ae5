"""Everything that lies outside of this host, as far as attacks are concerned: a unix socket on which this process
answers in the place of name servers and hosts, and keeps what it was asked.

::

    gateway process ── {"resolve": "docs.example"}\n ─► addresses\n           (`ways_out.py` is its other end)
                    ── {"dial": "93.184.216.34", "port": 80}\n ── HTTP ─► the page that the attack has put there

Whatever would have left the host comes here, and nowhere else.
"""

import asyncio
import contextlib
import json
from pathlib import Path

import h11

from headrace.actors.gateway.redteam.scene import Request, Scene
from headrace.actors.gateway.redteam.sites import PUBLIC, Page, Sites

_CHUNK = 65536


class Outside:
    """Answers for one scene at a time."""

    def __init__(self) -> None:
        self._server: asyncio.Server | None = None
        self._scene, self._sites = Scene(Path()), Sites()
        self._lookups: dict[str, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.requested = asyncio.Event()
        """A request has come since the scene began."""

    async def start(self, address: Path) -> None:
        """Listen."""
        self._server = await asyncio.start_unix_server(self._accept, address)

    def begin(self, scene: Scene, sites: Sites) -> None:
        """From now on everything is this scene's."""
        self._scene, self._sites = scene, sites
        self._lookups.clear()
        self.requested.clear()

    def change(self, sites: Sites) -> None:
        """Other answers, in the same scene."""
        self._sites = sites

    async def close(self) -> None:
        """Listen no more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    # --- one connection -----------------------------------------------------------------------------------------------

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._answer(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            asked = json.loads(await reader.readline())
            if "resolve" in asked:
                writer.write(json.dumps(self._addresses(asked["resolve"])).encode() + b"\n")
            else:
                self._scene.dialled.append((asked["dial"], asked["port"]))
                await self._host(reader, writer)
            await writer.drain()
        except (OSError, ValueError, h11.ProtocolError):
            pass
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    def _addresses(self, host: str) -> list[str]:
        self._scene.asked.append(host)
        answers = self._sites.names.get(host, [[PUBLIC]])
        count = self._lookups.get(host, 0)
        self._lookups[host] = count + 1
        return answers[min(count, len(answers) - 1)]

    async def _host(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = h11.Connection(h11.SERVER)
        request, body = None, b""
        while True:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                connection.receive_data(await reader.read(_CHUNK))
            elif isinstance(event, h11.Request):
                request = event
            elif isinstance(event, h11.Data):
                body += event.data
            else:
                break
        if request is None:
            return
        seen = self._seen(request, body)
        self._scene.requests.append(seen)
        self.requested.set()
        path = seen.path.partition("?")[0]
        page = self._sites.pages.get(f"{seen.host}{path}", self._sites.default)
        await _send(writer, page, dict(seen.headers))

    @staticmethod
    def _seen(request: h11.Request, body: bytes) -> Request:
        headers = tuple((name.decode("latin-1"), value.decode("latin-1")) for name, value in request.headers)
        host = dict(headers).get("host", "").partition(":")[0]
        return Request(host, request.method.decode(), request.target.decode("latin-1"), headers, body.decode("latin-1"))


async def _send(writer: asyncio.StreamWriter, page: Page, asked: dict[str, str]) -> None:
    body = _filled(page.body, asked)
    head = [f"HTTP/1.1 {page.status} OK", "Connection: close", "Content-Type: text/plain"]
    head += [f"{name}: {value}" for name, value in page.headers.items()]
    writer.write("\r\n".join([*head, "", ""]).encode())
    size = max(len(body) // page.pieces, 1)
    for _ in range(page.times):
        for at in range(0, max(len(body), 1), size):
            writer.write(body[at : at + size])
            await writer.drain()
            if page.slow_s:
                await asyncio.sleep(page.slow_s)


def _filled(body: bytes, asked: dict[str, str]) -> bytes:
    """With the headers of the request that the page shows, in three ways."""
    for name, value in asked.items():
        half = len(value) // 2
        body = body.replace(f"{{{name}}}".encode(), value.encode())
        body = body.replace(f"{{{name}:hex}}".encode(), value.encode().hex().encode())
        body = body.replace(f"{{{name}:escaped}}".encode(), f"{value[:half]}\x1b[0m{value[half:]}".encode())
    return body
