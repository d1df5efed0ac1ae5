"""Boxes in memory whose every call can be stopped at, for tests of what happens around them."""

import asyncio
import shlex

from headrace.platform.contracts import CommandResult
from headrace.platform.errors import SandboxDied


class KitBox:
    """Knows `cat FILE…` and `append TEXT FILE`."""

    def __init__(self, provider, sandbox_id, files):
        self.provider, self.sandbox_id, self.files, self.open = provider, sandbox_id, dict(files), True

    async def run(self, command, timeout_s, silence_s=None):
        await self._reached()
        word, *words = shlex.split(command)
        self.provider.commands.append([word, *words])
        if word in self.provider.answers:
            return self.provider.answers[word]
        if word == "append":
            self.files[words[1]] = self.files.get(words[1], b"") + words[0].encode()
            return CommandResult(0, "")
        missing = [path for path in words if path not in self.files]
        return CommandResult(int(bool(missing)), b"".join(self.files.get(path, b"") for path in words).decode())

    async def read(self, path):
        await self._reached()
        return self.files[path]

    async def write(self, path, data):
        await self._reached()
        self.files[path] = data

    async def snapshot(self):
        await self._reached()
        self.provider.made += 1
        self.provider.snapshots[f"s{self.provider.made}"] = dict(self.files)
        return f"s{self.provider.made}"

    async def close(self):
        await self.provider.pause()
        if self.open:
            self.open = False
            del self.provider.live[self.sandbox_id]
            self.provider.places.release()
        await self.provider.pause()

    async def _reached(self):
        await self.provider.pause()
        if not self.open:
            raise SandboxDied(f"{self.sandbox_id} is gone")


class KitProvider:
    """`live` are the open boxes, `snapshots` those not discarded. At call number `stop_at` the caller is cancelled."""

    mode = "bubblewrap"
    image_digest = "sha256:kit"

    def __init__(self, max_boxes=8, stop_at=None):
        self.live, self.snapshots, self.commands, self.answers = {}, {}, [], {}
        self.places = asyncio.Semaphore(max_boxes)
        self.made = self.calls = 0
        self.stop_at = stop_at

    async def pause(self):
        self.calls += 1
        if self.calls == self.stop_at:
            asyncio.current_task().cancel()
        await asyncio.sleep(0)

    async def create(self):
        return await self._open({})

    async def restore(self, snapshot_id):
        return await self._open(self.snapshots[snapshot_id])

    async def discard(self, snapshot_id):
        await self.pause()
        self.snapshots.pop(snapshot_id, None)

    async def reap(self):
        return 0

    async def close(self):
        for box in list(self.live.values()):
            await box.close()
        self.snapshots.clear()

    async def _open(self, files):
        await self.pause()
        await asyncio.wait_for(self.places.acquire(), 5)
        self.made += 1
        box = self.live[f"box-{self.made}"] = KitBox(self, f"box-{self.made}", files)
        return box
