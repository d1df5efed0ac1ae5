"""Where attacks are played: real gateway processes, real boxes, and all that lies outside of the host made up.

Owns the processes and folders; closing takes them all away. Plays are one at a time. It judges nothing: what came of a
play is for its attack to find in the scene.
"""

import contextlib
import secrets
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from msgspec.structs import replace

from headrace.actors.gateway.boxed import KINDS as BOXED_KINDS
from headrace.actors.gateway.policy import Mount, Policy
from headrace.actors.gateway.redteam.attack import BARE, FOLDER, Attack, AttackClass, Bare, Finding
from headrace.actors.gateway.redteam.boxes import SeenBoxes
from headrace.actors.gateway.redteam.gateways import RunningGateway, start_gateway
from headrace.actors.gateway.redteam.outside import Outside
from headrace.actors.gateway.redteam.scene import Scene
from headrace.actors.gateway.redteam.stage import Stage
from headrace.actors.sandboxes.opening import provider_for
from headrace.platform.config.sandbox import SandboxConfig
from headrace.platform.contracts import SandboxProvider

KEY_NAME = "HEADRACE_REDTEAM_KEY"
"""The variable of the gateway's environment that holds a key of the recipe's."""
_MOST_NAME = 40


@dataclass(frozen=True, slots=True)
class Kept:
    """An episode that was played to its end, and the audit of the gateway that it had for itself."""

    audit: Path
    episode: str
    head: str


class Lab:
    """An async context manager. `key` is the recipe's, `tried` what gateways would have connected to, had they been
    let; `scenes` are those of all plays."""

    def __init__(self) -> None:
        self.key = f"key-{secrets.token_hex(12)}"
        self.tried: list[str] = []
        self.scenes: list[Scene] = []
        self._outside = Outside()
        self._kept: dict[str, Kept] = {}
        self._gateway: RunningGateway | None = None
        self._provider: SandboxProvider | None = None
        self._plays = 0
        self._closing = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        self._folder = Path(self._closing.enter_context(tempfile.TemporaryDirectory(prefix="headrace-redteam-")))
        await self._outside.start(self._folder / "outside")
        self._closing.push_async_callback(self._outside.close)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._closing.aclose()

    def scene(self) -> Scene:
        """A new one, in a folder of its own."""
        scene = Scene(self._folder / f"scene-{len(self.scenes)}")
        scene.folder.mkdir()
        self.scenes.append(scene)
        return scene

    async def gateway(self) -> RunningGateway:
        """The one that most attacks share."""
        if self._gateway is None:
            self._gateway = await self._closing.enter_async_context(self.own_gateway())
        return self._gateway

    @contextlib.asynccontextmanager
    async def own_gateway(self) -> AsyncIterator[RunningGateway]:
        """One for a single attack, which may kill it."""
        folder = Path(tempfile.mkdtemp(prefix="gateway-", dir=self._folder))
        running = await start_gateway(folder, self._folder / "outside", {KEY_NAME: self.key})
        try:
            yield running
        finally:
            await running.close()
            self.tried += running.tried

    @contextlib.asynccontextmanager
    async def stage(
        self,
        attack: Attack,
        mode: Policy | Bare,
        gateway: RunningGateway | None = None,
        episode: str = "",
    ) -> AsyncIterator[Stage]:
        """One play, closed at the end. `episode`: as if it were that one."""
        self._plays += 1
        scene = self.scene()
        self._outside.begin(scene, attack.sites)
        client = (gateway or await self.gateway()).client
        policy = None if mode == BARE else _placed(mode, scene.folder)
        boxes = self._boxes(attack, scene) if policy is not None and _needs_box(policy) else None
        name = episode or f"{attack.attack_id[:_MOST_NAME]}-{self._plays}"
        stage = Stage(attack, scene, self._outside, name, policy, client, boxes)
        try:
            await stage.begin()
            yield stage
        finally:
            await stage.close()

    async def obeyed(self, attack: Attack, mode: Policy | Bare) -> Finding:
        """The usual play: the page is opened, and obeyed."""
        async with self.stage(attack, mode) as stage:
            await stage.obey()
        return stage.finding()

    async def kept(self, name: str, planted: str, policy: Policy) -> Kept:
        """An episode with a gateway of its own, which has ended; played once for each name."""
        if name not in self._kept:
            attack = Attack(attack_id=name, kind=AttackClass.AUDIT, about="", planted=planted, policy=policy)
            async with self.own_gateway() as gateway, self.stage(attack, policy, gateway) as stage:
                await stage.obey()
            self._kept[name] = Kept(gateway.audit, stage.episode, stage.head)
        return self._kept[name]

    def _boxes(self, attack: Attack, scene: Scene) -> SandboxProvider:
        if self._provider is None:
            self._provider = provider_for(SandboxConfig(), self._folder / "boxes")
            self._closing.push_async_callback(self._provider.close)
        return SeenBoxes(self._provider, attack.files, scene.workspace, attack.looks, scene.files)


def _needs_box(policy: Policy) -> bool:
    return any(mount.kind in BOXED_KINDS for mount in policy.mounts)


def _placed(policy: Policy, folder: Path) -> Policy:
    """`policy` with the scene's folder in the arguments of its mounts."""
    mounts = tuple(Mount(each.kind, each.name, each.capability, _filled(each.args, folder)) for each in policy.mounts)
    return replace(policy, mounts=mounts)


def _filled(value: Any, folder: Path) -> Any:
    if isinstance(value, dict):
        return {name: _filled(each, folder) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_filled(each, folder) for each in value]
    return value.replace(FOLDER, str(folder)) if isinstance(value, str) else value
