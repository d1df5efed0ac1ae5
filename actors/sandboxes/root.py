"""What a box of bubblewrap sees as its root: arguments for bwrap, the same for all boxes of a provider."""

import contextlib
import shutil
from collections.abc import Sequence
from pathlib import Path

import headrace

UID = 1000
_PASSWD = f"box:x:{UID}:{UID}:box:/workspace:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n"
_GROUP = f"box:x:{UID}:\nnogroup:x:65534:\n"
_HOSTS = "127.0.0.1 localhost box\n::1 localhost\n"
_TOP = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_OF_THE_HOST = ("ld.so.cache", "alternatives", "localtime")
_FOR_THE_NETWORK = ("resolv.conf", "nsswitch.conf", "services", "ssl/certs", "ssl/openssl.cnf")
_SHM_BYTES = 16 << 20


_PLACES = ("usr", "proc", "dev", "tmp", "workspace")


def write_root(folder: Path, network: bool) -> None:
    """Make a box's root in `folder`: its /etc, links, and places to mount something at. One folder is one mount, and
    mounts are what a start waits for."""
    folder.mkdir(mode=0o755)
    for name in _PLACES:
        (folder / name).mkdir(mode=0o755)
    for top in map(Path, _TOP):
        if top.is_symlink():
            (folder / top.name).symlink_to(top.readlink())
        elif top.is_dir():
            (folder / top.name).mkdir(mode=0o755)
    _write_etc(folder / "etc", network)


def _write_etc(folder: Path, network: bool) -> None:
    """Generated files, and copies of those of the host that programs cannot do without."""
    folder.mkdir(mode=0o755)
    for name, text in (("passwd", _PASSWD), ("group", _GROUP), ("hosts", _HOSTS)):
        (folder / name).write_text(text)
    for name in (*_OF_THE_HOST, *(_FOR_THE_NETWORK if network else ())):
        source, target = Path("/etc", name), folder / name
        target.parent.mkdir(exist_ok=True)
        with contextlib.suppress(OSError):  # a host may lack any of them
            if source.is_dir():
                shutil.copytree(source, target, symlinks=True)
            else:
                shutil.copyfile(source, target)


def root_arguments(root: Path, network: bool) -> list[str]:
    """Namespaces, the read-only root that `write_root` made, /proc and /dev. What is mounted writable comes after
    these."""
    arguments = ["--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session"]
    arguments += ["--as-pid-1", "--uid", str(UID), "--gid", str(UID), "--hostname", "box"]
    arguments += ["--clearenv", "--cap-drop", "ALL", *(["--share-net"] if network else [])]
    arguments += ["--ro-bind", str(root), "/", "--ro-bind", "/usr", "/usr"]
    for top in map(Path, _TOP):
        if top.is_dir() and not top.is_symlink():
            arguments += ["--ro-bind", str(top), str(top)]
    for hidden in _own_code():
        arguments += ["--size", "4096", "--tmpfs", str(hidden), "--remount-ro", str(hidden)]
    arguments += ["--proc", "/proc", *_closed_proc(), "--dev", "/dev", "--remount-ro", "/dev"]
    return [*arguments, "--size", str(_SHM_BYTES), "--perms", "1777", "--tmpfs", "/dev/shm"]


def _closed_proc() -> list[str]:
    """What of /proc sets the machine, read-only: where headrace runs as root, the box's user owns these files. And the
    names of its user's keys: containers and logins have some."""
    closed = ["--ro-bind", "/proc/sys", "/proc/sys"]
    for path in ("/proc/sysrq-trigger", "/proc/mtrr", "/proc/keys"):
        if Path(path).exists():
            closed += ["--ro-bind", "/dev/null", path]
    return closed


def _own_code() -> Sequence[Path]:
    """headrace's own folders where they lie under /usr: graders are none of an agent's business (case X5)."""
    links = [Path(folder) for folder in headrace.__path__]
    folders = {path.resolve() for link in links for path in (link, *link.iterdir()) if path.is_dir()}
    return sorted(path for path in folders if path.is_relative_to("/usr"))
