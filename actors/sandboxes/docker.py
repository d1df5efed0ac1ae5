"""Boxes that are containers, driven through the Docker SDK.

    image ─► template: the image with /workspace ─► container, attached shell ─► commit: a snapshot ─► container …

A container has no capabilities, no way to new ones, no network unless granted, a user that is not root, Docker's
seccomp profile, and limits by control groups and rlimits. Its root is writable only where that user may write: a
snapshot is a commit, and a commit holds the container's own layer, not its mounts. Its first process is the shell that
no agent writes to. Standard input closes with the connection, so that an idle container ends when its owner does;
labels name the owner for the reaper, which takes the others.

The SDK blocks: every call runs in a thread of the provider's own, and only here is it imported. What the daemon
refuses, and its absence, is SandboxDied.
"""

import asyncio
import contextlib
import os
import socket
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar

from headrace.actors.sandboxes.docker_box import DockerBox, Snapshot, own_connection
from headrace.actors.sandboxes.docker_channel import AttachedShell
from headrace.actors.sandboxes.docker_host import (
    PING_S,
    USER,
    WORKSPACE,
    ContainerGroup,
    daemon_url,
    innermost,
    knock,
    reachable,
    root_digest,
    unfit_for_boxes,
    write_start,
)
from headrace.actors.sandboxes.docker_sizes import Sizes
from headrace.actors.sandboxes.provider import START_S, BoxProvider
from headrace.actors.sandboxes.reaping import Owner
from headrace.actors.sandboxes.script import shell_argv
from headrace.actors.sandboxes.shell import Shell, ShellState
from headrace.actors.sandboxes.threads import QUICK, TREES
from headrace.platform.config.sandbox import SandboxConfig
from headrace.platform.errors import ConfigError, SandboxDied

OWNER, HOST, BOX, PROVIDER = "headrace.owner", "headrace.host", "headrace.box", "headrace.provider"
"""Labels: the process that a container or image belongs to, its machine; the box's number; the provider."""
_CALL_S, _THREADS, _HELD_THREADS = 60.0, 16, 64
_GONE_S, _TICK_S = 20.0, 0.01
_SHM_MB, _FILES = 16, 1024
_SHELLS = 2
_ATTACH = {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1}
T = TypeVar("T")


def why_not() -> str:
    """Why boxes of this kind cannot run here now; empty when they can. Asks the daemon, for a few seconds at most."""
    try:
        client, _ = _connect(PING_S)
    except ConfigError as error:
        return str(error)
    client.close()
    return ""


def _connect(timeout_s: float) -> tuple[Any, Mapping[str, Any]]:
    """A client of the daemon, and what that says of itself. Raises ConfigError when it cannot be used, with the fix."""
    try:
        import docker
    except ImportError:
        raise ConfigError("the Docker SDK is not installed; pip install 'headrace[docker]'") from None
    url = daemon_url()
    if not url.startswith(("unix://", "tcp://")) or os.environ.get("DOCKER_TLS_VERIFY"):
        raise ConfigError(f"DOCKER_HOST={url}: only unix:// and tcp:// without TLS can be attached to; use a tunnel")
    client = None
    try:
        knock(url)
        client = docker.APIClient(base_url=url, timeout=timeout_s, max_pool_size=_THREADS + _HELD_THREADS)
        about: Mapping[str, Any] = client.info()
        if unfit := unfit_for_boxes(about):
            raise ConfigError(f"the Docker daemon at {url} {unfit}")
    except (docker.errors.DockerException, OSError) as error:
        why = f"no Docker daemon answers at {url} ({innermost(error)}); start Docker, or set DOCKER_HOST"
        raise ConfigError(why) from None
    except ConfigError:
        assert client is not None
        client.close()
        raise
    return client, about


class Engine:
    """The daemon: blocking calls, each in a thread."""

    def __init__(self) -> None:
        self._client, about = _connect(_CALL_S)
        self.cpus = int(about["NCPU"])
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="headrace-docker")
        self._held = ThreadPoolExecutor(_HELD_THREADS, thread_name_prefix="headrace-docker-held")
        self.closed = False

    def about_image(self, name: str) -> Mapping[str, Any]:
        """What the daemon knows of an image. Blocks. Raises ConfigError when it has none of that name, with the fix."""
        import docker

        try:
            about: Mapping[str, Any] = self._client.inspect_image(name)
        except docker.errors.ImageNotFound:
            raise ConfigError(
                f"sandbox.image: the Docker daemon at {daemon_url()} has no image {name!r}, and nothing is fetched;"
                f" docker pull {name}, or build it"
            ) from None
        except (docker.errors.DockerException, OSError) as error:
            raise ConfigError(f"sandbox.image: {name!r} cannot be looked at: {innermost(error)}") from None
        if volumes := (about.get("Config") or {}).get("Volumes"):
            raise ConfigError(
                f"sandbox.image: {name!r} declares volumes ({', '.join(volumes)}): what is written there would be"
                " neither limited nor in a snapshot; build it without VOLUME"
            )
        return about

    async def call(self, work: Callable[[Any], T]) -> T:
        """Do something with the client. Raises SandboxDied when the daemon refuses it, or is gone."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._do, work)

    async def held(self, work: Callable[[Any], T]) -> T:
        """The same for what a box may hold up: in threads apart, so that only others of its sort wait."""
        return await asyncio.get_running_loop().run_in_executor(self._held, self._do, work)

    async def quietly(self, work: Callable[[Any], object]) -> bool:
        """The same where a refusal is no news; whether it was done."""
        try:
            await self.call(work)
        except SandboxDied:
            return False
        return True

    def close(self) -> None:
        """Let go of the daemon. Safe to call twice."""
        if not self.closed:
            self.closed = True
            self._threads.shutdown(wait=False)
            self._held.shutdown(wait=False)
            self._client.close()

    def _do(self, work: Callable[[Any], T]) -> T:
        from docker.errors import DockerException

        try:
            return work(self._client)
        except (DockerException, OSError) as error:  # those of the connection are OSErrors
            why = innermost(error)
        # Not from there: the SDK's error would keep the sockets open that it holds.
        raise SandboxDied(f"the box is gone: Docker says: {why}")


class DockerProvider(BoxProvider):
    """See `SandboxProvider`. `image_digest` is the image's id, and one digest over the layers of its root.

    Raises:
        ConfigError: there is no daemon, or no such image; with the fix.
    """

    mode = "docker"

    def __init__(self, config: SandboxConfig, state: Path) -> None:
        super().__init__(config, state)
        if not config.image:
            raise ConfigError("sandbox.image: a Docker box needs an image; name one that the daemon has")
        self.engine = Engine()
        try:
            about = self.engine.about_image(config.image)
        except BaseException:
            self.engine.close()
            raise
        self.image_digest = f"{about['Id']};rootfs={root_digest(about['RootFS'].get('Layers') or [])}"
        self._image: str = about["Id"]
        self._name = f"{Owner.this()}-{os.urandom(4).hex()}"
        self._building: asyncio.Task[tuple[str, str]] | None = None
        self._unwanted: list[str] = []
        self.sizes = Sizes(lambda: self.engine.call(self._ask_sizes))
        self._groups: dict[str, ContainerGroup] = {}

    async def reap(self) -> int:
        """See `SandboxProvider.reap`. Judges only what was made on this machine and in this pid namespace."""
        try:
            return await self.engine.call(_reap)
        except SandboxDied:
            return 0  # without a daemon there is nothing to reap

    async def remove(self, container: str) -> None:
        """End and remove a container, if it is there."""
        self._groups.pop(container, None)
        await self.engine.quietly(lambda client: _remove_container(client, container))

    async def sweep(self) -> None:
        """Remove the images of forgotten snapshots that nothing uses any more."""
        for image in reversed(self._unwanted):
            if await self.engine.quietly(partial(_remove_image, image=image)):
                self._unwanted.remove(image)

    def _ask_sizes(self, client: Any) -> Mapping[str, int]:
        found = client.containers(size=True, filters={"label": f"{PROVIDER}={self._name}"})
        return {
            one["Id"]: one.get("SizeRw", 0) + (group.unlinked_bytes() if (group := self._groups.get(one["Id"])) else 0)
            for one in found
        }

    async def _start(self, number: int, snapshot: Snapshot | None) -> DockerBox:
        starting = asyncio.ensure_future(self._bring_up(number, snapshot))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            self.finish(self._abandon(starting))
            raise

    async def _abandon(self, starting: "asyncio.Future[DockerBox]") -> None:
        # A thread cannot be cancelled: a box that nobody waits for comes up, and is ended.
        with contextlib.suppress(SandboxDied, OSError):
            await (await starting).close()

    async def _bring_up(self, number: int, snapshot: Snapshot | None) -> DockerBox:
        image, shell_path = await self._template()
        image = snapshot.image if snapshot else image
        container: str = await self.engine.call(
            lambda client: client.create_container(**self._options(client, image, shell_path, number))["Id"]
        )
        channel = AttachedShell(
            lambda: self._interrupt(container), lambda: self._limit_hit(container), lambda: self._why_gone(container)
        )
        try:
            connection = await self.engine.call(
                lambda client: own_connection(client.attach_socket(container, params=_ATTACH))
            )
            await channel.open(connection)
            await self.engine.call(lambda client: client.start(container))
            pid: int = (await self.engine.call(lambda client: client.inspect_container(container)))["State"]["Pid"]
            self._groups[container] = ContainerGroup(container, pid)
            if reachable(pid, container):
                channel.follow(pid)
            state = snapshot.state if snapshot else ShellState.first(WORKSPACE, {"HOME": WORKSPACE, "TMPDIR": "/tmp"})
            shell = Shell(channel, self.limits, state)
            await shell.listening(START_S)
            await shell.begin()
        except BaseException:
            channel.lose("it did not come up")
            await self.remove(container)
            raise
        return DockerBox(self, container, shell, channel)

    async def _interrupt(self, container: str) -> None:
        await self.engine.call(lambda client: client.kill(container, "SIGUSR1"))

    async def _limit_hit(self, container: str) -> str:
        group = self._groups.get(container)
        return "memory" if group is not None and await QUICK.do(group.memory_kill) else ""

    async def _why_gone(self, container: str) -> str:
        """What the daemon still knows of a container that has ended; it is being removed meanwhile."""
        with contextlib.suppress(SandboxDied):
            about = (await self.engine.call(lambda client: client.inspect_container(container)))["State"]
            if about.get("OOMKilled"):
                return "its shell was killed at the box's limit on memory"
            return f"its container ended with exit code {about.get('ExitCode')}"
        return ""

    async def _template(self) -> tuple[str, str]:
        """The image with /workspace as every box begins, and the shell that it has. Made once."""
        if self._building is None:
            self._building = asyncio.create_task(self._build())
        try:
            return await asyncio.shield(self._building)
        except (SandboxDied, OSError):
            self._building = None
            raise

    async def _build(self) -> tuple[str, str]:
        workspace = Path(self.config.workspace) if self.config.workspace else None
        with tempfile.TemporaryFile() as archive:
            await TREES.do(write_start, archive, workspace)
            archive.seek(0)
            return await self.engine.call(lambda client: _build(client, self._image, archive, self._labels({})))

    def _labels(self, more: Mapping[str, str]) -> dict[str, str]:
        return {OWNER: self._name.rpartition("-")[0], HOST: socket.gethostname(), PROVIDER: self._name, **more}

    async def _forget(self, snapshot: Snapshot) -> None:
        self._unwanted.append(snapshot.image)
        await self.sweep()

    async def _release(self) -> None:
        if not self.engine.closed:
            if self._building is not None:
                with contextlib.suppress(SandboxDied, OSError):
                    self._unwanted.insert(0, (await self._building)[0])
            await self.sweep()
            self.engine.close()

    def _options(self, client: Any, image: str, shell: str, number: int) -> dict[str, Any]:
        """The arguments of `create_container`."""
        from docker.types import LogConfig, Ulimit

        config = self.config
        hard = {"fsize": config.file_mb << 20, "cpu": config.cpu_s, "core": 0, "nofile": _FILES}
        host = client.create_host_config(
            auto_remove=True,
            cap_drop=["ALL"],
            security_opt=["no-new-privileges"],
            network_mode="host" if config.network else "none",
            ipc_mode="private",
            shm_size=f"{_SHM_MB}m",
            mem_limit=f"{config.memory_mb}m",
            memswap_limit=f"{config.memory_mb}m",
            nano_cpus=int(min(config.cpus, self.engine.cpus) * 1e9),
            pids_limit=config.pids + _SHELLS,
            ulimits=[Ulimit(name=name, soft=value, hard=value) for name, value in hard.items()],
            log_config=LogConfig(type="none"),  # else the daemon keeps all that commands print
        )
        return {
            "image": image,
            "entrypoint": shell_argv(shell, host=False),
            "host_config": host,
            "user": f"{USER}:{USER}",
            "working_dir": WORKSPACE,
            "hostname": "box",
            "stdin_open": True,  # and with it StdinOnce: it closes when the owner goes
            "healthcheck": {"test": ["NONE"]},
            "labels": self._labels({BOX: str(number)}),
        }


def _remove_container(client: Any, container: str) -> None:
    """End and remove it, and wait until it is gone: it may be going by itself already. Blocks."""
    from docker.errors import APIError, NotFound

    until = time.monotonic() + _GONE_S
    with contextlib.suppress(NotFound):
        while time.monotonic() < until:
            try:
                client.remove_container(container, force=True, v=True)
            except NotFound:
                return
            except APIError:
                time.sleep(_TICK_S)
            client.inspect_container(container)


def _remove_image(client: Any, image: str) -> None:
    """Of untagged parents none goes with it: they are other snapshots. Blocks."""
    from docker.errors import ImageNotFound

    with contextlib.suppress(ImageNotFound):
        client.remove_image(image, noprune=True)


def _build(client: Any, image: str, archive: IO[bytes], labels: Mapping[str, str]) -> tuple[str, str]:
    """An image with what `archive` holds added, and the shell in it. Blocks."""
    from docker.errors import NotFound

    container = client.create_container(image, ["/bin/sh"], labels=dict(labels))["Id"]
    try:
        client.put_archive(container, "/", archive)
        shell = "/bin/sh"
        with contextlib.suppress(NotFound):
            parts, _ = client.get_archive(container, "/bin/bash")
            parts.close()
            shell = "/bin/bash"
        return client.commit(container)["Id"], shell
    finally:
        client.remove_container(container, force=True, v=True)


def _reap(client: Any) -> int:
    """Remove containers and images whose owners have ended. Blocks."""
    from docker.errors import APIError

    boxes = 0
    mine = {"label": f"{HOST}={socket.gethostname()}"}
    for found in client.containers(all=True, filters=mine):
        if _is_left(found):
            with contextlib.suppress(APIError):  # another reaper was faster, or it goes by itself
                client.remove_container(found["Id"], force=True, v=True)
                boxes += BOX in found["Labels"]
    for found in sorted(client.images(all=True, filters=mine), key=lambda image: -image["Created"]):
        if _is_left(found):
            with contextlib.suppress(APIError):
                _remove_image(client, found["Id"])
    return boxes


def _is_left(found: Mapping[str, Any]) -> bool:
    try:
        return Owner.named((found.get("Labels") or {}).get(OWNER, "")).is_dead()
    except ValueError:
        return False
