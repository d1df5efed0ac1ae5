"""All that the probes take from the machine: packages, programs, files, sizes. Tests put a fake in its place."""

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import psutil

import headrace
from headrace.platform.errors import DeadlineExceeded
from headrace.platform.ledger.server import EmbeddedServer


@dataclass(frozen=True, slots=True)
class Done:
    """How a program ended, and what it said on both outputs."""

    code: int
    output: str


class Host:
    """This machine. Nothing here changes it, and no program outlives its call."""

    def version(self, distribution: str) -> str | None:
        """The installed version of a distribution, or None."""
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            return None

    def requirements(self, distribution: str) -> list[str] | None:
        """What an installed distribution says it requires, extras included, or None when it is not installed."""
        try:
            return list(metadata.requires(distribution) or [])
        except metadata.PackageNotFoundError:
            return None

    def source(self) -> Path | None:
        """The folder of headrace's source when it runs from a checkout, as an editable installation does, or None."""
        folder = Path(headrace.__file__).resolve().parent.parent
        return folder if (folder / "pyproject.toml").is_file() else None

    def package_file(self, distribution: str, name: str) -> Path | None:
        """The file of an installed distribution whose path in it is `name`, or None; nothing is imported."""
        try:
            files = metadata.files(distribution) or []
        except metadata.PackageNotFoundError:
            return None
        return next((Path(str(file.locate())) for file in files if str(file) == name), None)

    def which(self, program: str) -> str | None:
        """The path of a program, or None."""
        return shutil.which(program)

    def run(self, command: Sequence[str], deadline_s: float) -> Done:
        """Run a program to its end.

        Raises:
            OSError: it cannot be started.
            DeadlineExceeded: it took too long; it and its children are killed.
        """
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        with process:
            try:
                output, _ = process.communicate(timeout=deadline_s)
            except subprocess.TimeoutExpired:
                raise DeadlineExceeded(f"{Path(command[0]).name} did not end within {deadline_s:g} s") from None
            finally:
                if process.poll() is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
        return Done(process.returncode, output)

    def try_embedded_server(self, deadline_s: float) -> None:
        """Start the queue's embedded server in a folder of its own until it answers, and end it.

        Raises:
            HeadraceError: it is not installed, or does not start.
        """
        with (
            tempfile.TemporaryDirectory(prefix="headrace-doctor-") as folder,
            EmbeddedServer(Path(folder), ready_deadline_s=deadline_s),
        ):
            pass

    def read(self, path: Path) -> str | None:
        """The text of a file, or None when it cannot be read."""
        try:
            return path.read_text("utf-8", errors="replace")
        except OSError:
            return None

    def cores(self) -> int:
        """Cores that this process may use."""
        return len(os.sched_getaffinity(0))

    def memory(self) -> tuple[int, int]:
        """Bytes of memory: all, and available now."""
        memory = psutil.virtual_memory()
        return int(memory.total), int(memory.available)

    def disk(self, folder: Path) -> tuple[int, bool]:
        """Bytes free where `folder` lies or would lie, and whether it can be written or made."""
        there = next(path for path in (folder, *folder.parents) if path.exists())
        return shutil.disk_usage(there).free, os.access(there, os.W_OK | os.X_OK)

    def shared_memory(self) -> int | None:
        """Bytes of /dev/shm, or None without one."""
        try:
            return shutil.disk_usage("/dev/shm").total
        except OSError:
            return None

    def open_files(self) -> tuple[int, int]:
        """How many files a process may open: as set, and as it may set for itself."""
        return resource.getrlimit(resource.RLIMIT_NOFILE)

    def why_no_sandbox(self, mode: str) -> str:
        """Why boxes of this kind cannot run here now; empty when they can."""
        from headrace.actors.sandboxes.opening import why_not  # its libraries are loaded only for those who ask

        return why_not(mode)
