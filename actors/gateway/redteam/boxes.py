"""Boxes of attacks: they begin with the attack's files, and are looked at before they are gone."""

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from headrace.actors.gateway.redteam.attack import LINK
from headrace.platform.contracts import Sandbox, SandboxProvider

_LINK_S = 10.0


class SeenBoxes:
    """Makes boxes by another provider. What is in `looks` when a box is closed is kept in `found`.

    Args:
        inner: makes them.
        files: what they begin with; scripts can be run.
        workspace: the folder of the host that links lead to.
        looks: files of the workspace.
        found: gets them.
    """

    def __init__(
        self,
        inner: SandboxProvider,
        files: Mapping[str, str],
        workspace: Path,
        looks: Sequence[str],
        found: dict[str, str],
    ) -> None:
        self.mode, self.image_digest = inner.mode, inner.image_digest
        self._inner, self._files, self._workspace = inner, files, workspace
        self._looks, self._found = looks, found

    async def create(self) -> Sandbox:
        """See `SandboxProvider`."""
        box = await self._inner.create()
        for path, text in self._files.items():
            if text.startswith(LINK):
                target = self._workspace / text.removeprefix(LINK)
                await box.run(f"ln -s {shlex.quote(os.fspath(target))} {shlex.quote(path)}", _LINK_S)
            else:
                await box.write(path, text.encode())
        if scripts := [shlex.quote(path) for path, text in self._files.items() if text.startswith("#!")]:
            await box.run(f"chmod +x {' '.join(scripts)}", _LINK_S)
        return _SeenBox(box, self._looks, self._found)

    async def restore(self, snapshot_id: str) -> Sandbox:
        """See `SandboxProvider`."""
        return await self._inner.restore(snapshot_id)

    async def discard(self, snapshot_id: str) -> None:
        """See `SandboxProvider`."""
        await self._inner.discard(snapshot_id)

    async def reap(self) -> int:
        """See `SandboxProvider`."""
        return await self._inner.reap()

    async def close(self) -> None:
        """See `SandboxProvider`. The boxes are their maker's."""


class _SeenBox:
    def __init__(self, inner: Sandbox, looks: Sequence[str], found: dict[str, str]) -> None:
        self.sandbox_id, self.workspace = inner.sandbox_id, inner.workspace
        self._inner, self._looks, self._found = inner, looks, found
        self.run, self.read, self.write, self.snapshot = inner.run, inner.read, inner.write, inner.snapshot

    async def close(self) -> None:
        for path in self._looks:
            try:
                self._found[path] = (await self._inner.read(path)).decode(errors="replace")
            except FileNotFoundError:
                continue
        await self._inner.close()
