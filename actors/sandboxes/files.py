"""One file of a box, read or written from outside as the box sees it.

Paths are resolved by the kernel below a folder that is their root (openat2 with RESOLVE_IN_ROOT, Linux 5.6): no link,
however it is made or changed meanwhile, leads out of it. This process may be allowed more than the box is; so only
plain files of true file systems are opened, never those by which a kernel is read or set, such as /proc's. A lease that
an agent holds on a file is not waited for: opening it fails. All of it blocks: call it in a thread.
"""

import contextlib
import ctypes
import errno
import os
import posixpath
import stat
from collections.abc import Iterator

_OPENAT2 = 437
_RESOLVE_NO_MAGICLINKS = 0x02
_RESOLVE_IN_ROOT = 0x10
_NO_FILES = {0x9FA0, 0x62656572, 0x64626720, 0x74726163, 0x27E0EB, 0x63677270, 0x73636673, 0xCAFE4A11, 0x1CD1}
"""proc, sysfs, debugfs, tracefs, cgroup, cgroup2, securityfs, bpf, devpts (statfs(2))."""
_STATFS_BYTES = 256


class _How(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


def read_below(root: int, path: str, limit: int) -> bytes:
    """The bytes of the file at `path` below the folder `root` (a descriptor).

    Raises:
        FileNotFoundError: there is none.
        OSError: it is no plain file, or larger than `limit` bytes, or a process holds a lease on it.
    """
    with _found(root, path) as found:
        file = os.open(_plain(found, path), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        chunks, size = [], 0
        while chunk := os.read(file, min(1 << 20, limit + 1 - size)):
            chunks.append(chunk)
            size += len(chunk)
            if size > limit:
                raise OSError(errno.EFBIG, f"larger than {limit} bytes", path)
        return b"".join(chunks)
    finally:
        os.close(file)


def write_below(root: int, path: str, data: bytes, limit: int) -> None:
    """Create or replace a file, and the folders above it.

    Raises:
        OSError: it is no plain file, `data` is larger than `limit` bytes, there is no room, or a process holds a lease
            on it.
    """
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"larger than {limit} bytes", path)
    file = _writable(root, path)
    try:
        left = memoryview(data)
        while left:
            left = left[os.write(file, left) :]
    finally:
        os.close(file)


def _writable(root: int, path: str) -> int:
    """An empty file at `path`."""
    folder, name = posixpath.split(path)
    try:
        with _found(root, path) as found:
            flags = os.O_WRONLY | os.O_TRUNC | os.O_NONBLOCK | os.O_CLOEXEC
            return os.open(_plain(found, path), flags)
    except FileNotFoundError:
        _make_folders(root, folder)
    with _found(root, folder) as above:
        _check_system(above, path)
        return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644, dir_fd=above)


def _make_folders(root: int, path: str) -> None:
    names = [name for name in path.split("/") if name]
    for count in range(1, len(names) + 1):
        try:
            with _found(root, "/".join(names[:count])):
                continue
        except FileNotFoundError:
            with _found(root, "/".join(names[: count - 1])) as above:
                _check_system(above, path)
                os.mkdir(names[count - 1], 0o755, dir_fd=above)


@contextlib.contextmanager
def _found(root: int, path: str) -> Iterator[int]:
    """A descriptor that names what is at `path`, but does not open it. Raises OSError."""
    if "\0" in path:
        raise OSError(errno.EINVAL, "a path cannot contain the character NUL", path)
    libc = ctypes.CDLL(None, use_errno=True)
    how = _How(os.O_PATH | os.O_CLOEXEC, 0, _RESOLVE_IN_ROOT | _RESOLVE_NO_MAGICLINKS)
    size, name = ctypes.c_size_t(ctypes.sizeof(how)), os.fsencode(path or "/")
    while True:
        found: int = libc.syscall(ctypes.c_long(_OPENAT2), ctypes.c_int(root), name, ctypes.byref(how), size)
        if found >= 0:
            break
        number = ctypes.get_errno()
        if number not in (errno.EINTR, errno.EAGAIN):  # EAGAIN: something was renamed meanwhile
            raise OSError(number, os.strerror(number), path)
    try:
        yield found
    finally:
        os.close(found)


def _plain(found: int, path: str) -> str:
    """The name by which a descriptor of a plain file can be opened."""
    mode = os.fstat(found).st_mode
    if not stat.S_ISREG(mode):
        raise OSError(errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL, "is no plain file", path)
    _check_system(found, path)
    return f"/proc/self/fd/{found}"


def _check_system(found: int, path: str) -> None:
    buffer = ctypes.create_string_buffer(_STATFS_BYTES)
    if ctypes.CDLL(None, use_errno=True).fstatfs(ctypes.c_int(found), buffer):
        raise OSError(ctypes.get_errno(), "cannot be looked at", path)
    if ctypes.c_long.from_buffer(buffer).value in _NO_FILES:
        raise PermissionError(errno.EACCES, "is part of the kernel, not a file", path)
