"""The folder in which the gateway of a node lives, and what lies in it.

::

    HOME/           0700, of this user: whoever can read it may speak to the gateway
      lock          held by whoever is starting a process
      pid           held by the process as long as it lives; its number
      token         shown by every client, new for each process
      address       names this folder, and the socket, which lies in a private folder of its own: a run's path may
                    be too long for one, and a run may be copied, whose copy is another home
      log           what the process and its tools have to say

Holds no open file and starts nothing.
"""

import os
import secrets
import stat
import tempfile
from pathlib import Path


class Home:
    """The gateway's folder, on this node.

    Raises:
        PermissionError: others may enter it, or it is somebody else's.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check(self.path)
        self.lock, self.pid, self.log = self.path / "lock", self.path / "pid", self.path / "log"
        self._token, self._address = self.path / "token", self.path / "address"

    def address(self) -> str:
        """Where the process listens. Raises FileNotFoundError where none ever did."""
        home, _, address = self._address.read_text(encoding="utf-8").partition("\n")
        if home != str(self.path):
            raise FileNotFoundError(f"{self._address} is a copy: it names {home}")
        _check(Path(address).parent)
        return address

    def token(self) -> str:
        """What the living process wants to be shown. Raises FileNotFoundError where there is none."""
        return self._token.read_text(encoding="ascii")

    def settle_in(self) -> tuple[str, str]:
        """For the process: a free address, and a new token that clients find."""
        if not self._has_address():
            folder = tempfile.mkdtemp(prefix="headrace-gateway-")  # 0700
            _replace(self._address, f"{self.path}\n{folder}/socket")
        address, token = self.address(), secrets.token_hex(32)
        Path(address).unlink(missing_ok=True)
        _replace(self._token, token)
        return address, token

    def leave(self) -> None:
        """For the process: nobody listens any more. The folder may be gone already."""
        try:
            address = Path(self.address())
        except OSError:
            return
        address.unlink(missing_ok=True)
        self._token.unlink(missing_ok=True)
        address.parent.rmdir()
        self._address.unlink(missing_ok=True)

    def _has_address(self) -> bool:
        try:
            self.address()
        except OSError:
            return False
        return True


def _check(folder: Path) -> None:
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise PermissionError(f"{folder} is not a folder of this user")
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise PermissionError(f"{folder} is open to others: chmod 700 it")


def _replace(path: Path, text: str) -> None:
    """Write a file that its owner alone can read, whole or not at all."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.write(file, text.encode())
    finally:
        os.close(file)
    new.replace(path)
