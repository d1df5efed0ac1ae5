"""A Docker daemon of our own, on a private socket in a temporary folder, with an image made from files of this machine.

It takes no part in what the machine runs otherwise: own data, own socket, no bridge, no iptables, nothing fetched. It
ends with whoever started it, also when that one is killed. Needs root, and what scripts/system.sh installs.
"""

import contextlib
import io
import os
import shutil
import signal
import socket
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import docker
import psutil

IMAGE = "headrace-test"
READY_S = 30.0
_STOP_S = 20.0
_CALM, _TICK_S = 3, 0.02
_LOG_BYTES = 4000
_BUSYBOX = "/bin/busybox"
_COPIED = ("/bin/bash", "/usr/bin/perl")
"""Dynamic programs that the image has as well: the shell as on other systems, and one that can call the kernel."""


class DockerDaemon:
    """`with DockerDaemon() as daemon`: `url` for DOCKER_HOST, and the image `headrace-test`."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="headrace-dockerd-"))  # short: it holds a socket
        self.url = f"unix://{self.folder}/docker.sock"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "DockerDaemon":
        try:
            self._start()
            self._import_image()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def client(self) -> docker.DockerClient:
        """A client of this daemon; whoever asks closes it."""
        return docker.DockerClient(base_url=self.url, timeout=READY_S)

    def log(self) -> str:
        """The end of what the daemon said."""
        try:
            return (self.folder / "log").read_bytes()[-_LOG_BYTES:].decode(errors="replace")
        except OSError:
            return ""

    def kill(self) -> None:
        """End it as a crash would."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._process = None  # the number in its pid file may be somebody else's from now on

    def stop(self) -> None:
        """End it by its pid file, with its containers, and remove its folder. Safe to call twice."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(OSError, ValueError):
                os.kill(int((self.folder / "pid").read_text()), signal.SIGTERM)
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._clear()
        shutil.rmtree(self.folder, ignore_errors=True)

    def left(self) -> list[psutil.Process]:
        """What runs of it: the daemon, its supervisors, and below each of these the containers' processes, first."""
        found: list[psutil.Process] = []
        for process in psutil.process_iter(["cmdline", "status"]):
            ours = any(str(self.folder) in word for word in process.info["cmdline"] or [])
            if ours and process.pid != os.getpid() and process.info["status"] != psutil.STATUS_ZOMBIE:
                with contextlib.suppress(psutil.NoSuchProcess):
                    found += [*process.children(recursive=True), process]
        return found

    def _clear(self) -> None:
        """End what a daemon leaves that was killed: its containers' supervisors, their children, and its mounts."""
        mark, calm, until = str(self.folder), 0, time.monotonic() + _STOP_S
        while calm < _CALM and time.monotonic() < until:
            left = self.left()
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            # A supervisor that was just being started shows late.
            calm = 0 if left else calm + 1
            time.sleep(_TICK_S)
        lines = Path("/proc/self/mounts").read_text().splitlines()
        mounts = [line.split()[1] for line in lines if line.split()[1].startswith(mark + "/")]
        for mount in reversed(mounts):
            subprocess.run(["umount", "-l", mount], check=False)

    def _start(self) -> None:
        for program in ("dockerd", "containerd", "runc", "setpriv"):
            if shutil.which(program) is None:
                raise RuntimeError(f"{program} is missing: scripts/system.sh installs what the tests need")
        command = ["setpriv", "--pdeathsig", "TERM", "dockerd", "--data-root", str(self.folder / "root")]
        command += ["--exec-root", str(self.folder / "exec"), "--pidfile", str(self.folder / "pid"), "-H", self.url]
        command += ["--iptables=false", "--ip6tables=false", "--bridge=none"]
        with (self.folder / "log").open("wb") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        end_s = time.monotonic() + READY_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > end_s:
                raise RuntimeError(f"dockerd did not come up within {READY_S:g} s; its log ends with:\n{self.log()}")
            time.sleep(0.05)

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(READY_S)
            try:
                connection.connect(self.url.removeprefix("unix://"))
                connection.sendall(b"GET /_ping HTTP/1.0\r\n\r\n")
                return b" 200 " in connection.recv(100)
            except OSError:
                return False

    def _import_image(self) -> None:
        client = self.client()
        try:
            client.api.import_image_from_data(root_files(), repository=IMAGE, tag="latest", changes='CMD ["/bin/sh"]')
        finally:
            client.close()


def root_files(programs: Sequence[str] = _COPIED) -> bytes:
    """A root file system as a tar archive: busybox, programs of this machine, a user 1000, /tmp and /workspace."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        for folder, mode in (("tmp", 0o1777), ("workspace", 0o1777), ("bin", 0o755), ("etc", 0o755), ("usr", 0o755)):
            _add_folder(tar, folder, mode)
        _add_folder(tar, "root", 0o700)
        for applet in _lines([_BUSYBOX, "--list"]):
            if applet != "busybox":
                _add_link(tar, f"bin/{applet}", "busybox")
        for link in ("usr/bin", "sbin", "usr/sbin"):
            _add_link(tar, link, "/bin")
        _add_text(tar, "etc/passwd", "root:x:0:0:root:/root:/bin/sh\nagent:x:1000:1000:agent:/workspace:/bin/sh\n")
        _add_text(tar, "etc/group", "root:x:0:\nagent:x:1000:\n")
        _add_text(tar, "etc/shadow", "root:*:19000:0:99999:7:::\n", 0o600)
        added: set[str] = set()
        for program in (_BUSYBOX, *programs):
            _add_program(tar, program, added)
    return data.getvalue()


def _add_program(tar: tarfile.TarFile, program: str, added: set[str]) -> None:
    """A program with the libraries that `ldd` names, at their own paths; a static one has none."""
    tar.add(Path(program).resolve(), f"bin/{Path(program).name}")
    for line in subprocess.run(["ldd", program], capture_output=True, text=True).stdout.splitlines():
        library = next((word for word in line.split() if word.startswith("/")), "")
        if library and library not in added:
            added.add(library)
            tar.add(Path(library).resolve(), library.lstrip("/"))


def _lines(command: list[str]) -> list[str]:
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()


def _add_folder(tar: tarfile.TarFile, name: str, mode: int) -> None:
    info = tarfile.TarInfo(name)
    info.type, info.mode = tarfile.DIRTYPE, mode
    tar.addfile(info)


def _add_link(tar: tarfile.TarFile, name: str, target: str) -> None:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = tarfile.SYMTYPE, target
    tar.addfile(info)


def _add_text(tar: tarfile.TarFile, name: str, text: str, mode: int = 0o644) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(text.encode()), mode
    tar.addfile(info, io.BytesIO(text.encode()))
