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
import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from common import Row, absent, result, row_of, table
from sandbox_clock import CLOCK, Sample, clocked
from sandbox_systems import BUILTIN, PROGRAM, BareBwrap, BareDocker, Product, System, checked

from headrace import __version__
from headrace.actors.sandboxes.opening import why_not
from headrace.platform.config.sandbox import MODES
from headrace.platform.contracts import SandboxProvider

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))  # the daemon that the tests use

TARGET, SNAPSHOT_TARGET = 1.3, 0.2
WORKSPACE_FILES, FILE_BYTES = 400, 50_000
DIFFS_KB = (200, 20_000)
CYCLE, COMMAND, IN_SHELL = "create + exec + destroy", "command", "command of the shell itself"
JOBS = (CYCLE, COMMAND, IN_SHELL)


@dataclass(slots=True)
class Measured:
    """All repetitions of one system, by job."""

    system: System
    samples: dict[str, list[Sample]] = field(default_factory=dict)

    def median(self, job: str, clock: str) -> float:
        """Milliseconds of one operation by a clock: cpu_ms or wall_ms."""
        return statistics.median(getattr(sample, clock) for sample in self.samples[job])


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
