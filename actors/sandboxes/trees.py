"""Whole folder trees that an agent filled: measured, copied and removed, whatever it made of them.

Every folder is opened below the one before it, links never: what an agent changes meanwhile leads nowhere else.
Nothing recurses, and the holes of a sparse file stay holes. A copy keeps what an overlay says by whiteouts and opaque
folders, so that a copied upper layer can serve as a lower one. All of it blocks: call it in a thread.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

DEEPEST = 128
"""Folders within folders; a tree that goes deeper is neither measured nor copied, but removed."""
_ENTRY_BYTES = 4096
"""What a name costs besides what is in it. File systems hold few more files than one for each 16 KiB of theirs, and the
time that a look takes grows with the files: a limit on the disk has to bound both."""
_OPAQUE = "user.overlay.opaque"
_OVERLAY = "user.overlay."
_COPY_CHUNK = 1 << 24
_LONGEST_PATH = 4096
_READ_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_MAKE_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def used_bytes(folders: Iterable[Path], limit: int) -> int:
    """What the trees take on the disk, 4 KiB for each entry included, a file with several names once; stops counting
    beyond `limit`.

    Raises:
        OSError: one goes too deep.
    """
    used, linked = 0, set[tuple[int, int]]()
    for folder in folders:
        open_now = [os.open(folder, _READ_FOLDER)]
        todo = [_names(open_now[0])]
        try:
            while todo and used <= limit:
                name = next(todo[-1], None)
                if name is None:
                    todo.pop()
                    os.close(open_now.pop())
                    continue
                # It may have gone meanwhile, or the agent closed it: what is in it counts once it is open again.
                with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
                    found = os.stat(name, dir_fd=open_now[-1], follow_symlinks=False)
                    file = found.st_dev, found.st_ino
                    used += _ENTRY_BYTES + (0 if file in linked else found.st_blocks * 512)
                    if found.st_nlink > 1:
                        linked.add(file)
                    if stat.S_ISDIR(found.st_mode):
                        _go_down(name, open_now)
                        todo.append(_names(open_now[-1]))
        finally:
            _close(open_now)
    return used


def remove_tree(folder: Path) -> None:
    """Remove a tree; one that is not there is passed over. Folders are moved up before they are emptied, so that none
    lies deep.

    Raises:
        OSError: what is left cannot be removed.
    """
    try:
        top = _unlocked(str(folder), None)
    except FileNotFoundError:
        return
    made, waiting = 0, [""]
    try:
        while waiting:
            name = waiting.pop()
            here = _unlocked(name, top) if name else top
            try:
                for entry in list(_names(here)):
                    if not stat.S_ISDIR(os.stat(entry, dir_fd=here, follow_symlinks=False).st_mode):
                        os.unlink(entry, dir_fd=here)
                        continue
                    moved = entry
                    if name:
                        made += 1
                        moved = f".{os.getpid()}-{made}"
                        os.close(_unlocked(entry, here))  # moving a folder rewrites its `..`
                        os.rename(entry, moved, src_dir_fd=here, dst_dir_fd=top)
                    waiting.append(moved)
            finally:
                if name:
                    os.close(here)
            if name:
                os.rmdir(name, dir_fd=top)
    finally:
        os.close(top)
    folder.rmdir()


class _Counted:
    """What a copy takes, and where it has put the files that have several names."""

    def __init__(self, limit: int | None) -> None:
        self.used = 0
        self._limit = limit
        self._places: dict[tuple[int, int], str] = {}

    def add(self, size: int) -> None:
        """Raises OSError beyond the limit."""
        self.used += size
        if self._limit is not None and self.used > self._limit:
            raise OSError(errno.EDQUOT, "it was over its disk")

    def linked(self, seen: os.stat_result, place: str, top: int, name: str, target: int) -> bool:
        """Whether the file is there under another name, and now under this one too; a path too long is no other."""
        if seen.st_nlink < 2:
            return False
        there = self._places.setdefault((seen.st_dev, seen.st_ino), place)
        if there == place or len(os.fsencode(there)) >= _LONGEST_PATH:
            return False
        os.link(there, name, src_dir_fd=top, dst_dir_fd=target, follow_symlinks=False)
        return True


def copy_layer(source: Path, target: Path, limit: int | None = None) -> int:
    """Put the tree `source` onto the folder `target` as an overlay would show the two, and keep what it says about
    layers further down. Links, hard ones too, modes and times are kept; owners become this process's. `target` must be
    out of the agent's reach.

    Returns:
        The bytes that it takes, counted as `used_bytes` does.

    Raises:
        OSError: it takes more than `limit` bytes, there is no room, or it goes too deep.
    """
    target.mkdir(parents=True, exist_ok=True)
    sources, targets = [_readable(str(source), None)], [os.open(target, _READ_FOLDER)]
    todo, above, counted = [_names(sources[0])], [""], _Counted(limit)
    try:
        while todo:
            name = next(todo[-1], None)
            if name is None:
                todo.pop()
                seen = os.fstat(sources[-1])
                os.fchmod(targets[-1], stat.S_IMODE(seen.st_mode))
                os.utime(targets[-1], ns=(seen.st_atime_ns, seen.st_mtime_ns))
                os.close(sources.pop())
                os.close(targets.pop())
                above.pop()
            elif _copy_entry(name, sources[-1], targets, counted, above[-1] + name):
                _go_down(name, sources)
                _go_down(name, targets)
                _copy_attributes(sources[-1], targets[-1])
                todo.append(_names(sources[-1]))
                above.append(f"{above[-1]}{name}/")
    finally:
        _close(sources)
        _close(targets)
    return counted.used


def _copy_entry(name: str, source: int, targets: list[int], counted: _Counted, place: str) -> bool:
    """Copy what is no folder, to `place`; whether it is one, which now is there, empty or to be merged."""
    seen, target = os.stat(name, dir_fd=source, follow_symlinks=False), targets[-1]
    counted.add(_ENTRY_BYTES)
    if stat.S_ISDIR(seen.st_mode):
        _make_folder(name, source, target)
        return True
    _clear(name, target)
    if stat.S_ISLNK(seen.st_mode):
        os.symlink(os.readlink(name, dir_fd=source), name, dir_fd=target)
    elif stat.S_ISREG(seen.st_mode):
        if counted.linked(seen, place, targets[0], name, target):
            return False
        counted.add(seen.st_blocks * 512)
        _copy_file(name, source, target, seen)
    elif stat.S_ISCHR(seen.st_mode) and seen.st_rdev == 0:
        os.mknod(name, stat.S_IFCHR, 0, dir_fd=target)
    elif stat.S_ISFIFO(seen.st_mode):
        os.mkfifo(name, stat.S_IMODE(seen.st_mode), dir_fd=target)
    else:
        return False  # a socket: nobody listens at a copy of it
    os.utime(name, ns=(seen.st_atime_ns, seen.st_mtime_ns), dir_fd=target, follow_symlinks=False)
    return False


def _make_folder(name: str, source: int, target: int) -> None:
    old = _readable(name, source)
    try:
        opaque = _is_opaque(old)
    finally:
        os.close(old)
    there = _mode(name, target)
    if there is not None and not stat.S_ISDIR(there):
        opaque = True  # it hid a file, or was a whiteout: nothing further down shows through
    if there is not None and opaque:
        _clear(name, target)
        there = None
    if there is None:
        os.mkdir(name, 0o700, dir_fd=target)
    if opaque:
        new = os.open(name, _READ_FOLDER, dir_fd=target)
        try:
            os.setxattr(new, _OPAQUE, b"y")
        finally:
            os.close(new)


def _copy_file(name: str, source: int, target: int, seen: os.stat_result) -> None:
    try:
        old = os.open(name, _READ_FILE, dir_fd=source)
    except PermissionError:
        # An agent may have taken its own right to read it away; it is this user's all the same.
        os.close(_unlocked(name, source))
        old = os.open(name, _READ_FILE, dir_fd=source)
    try:
        new = os.open(name, _MAKE_FILE, 0o600, dir_fd=target)
        try:
            _copy_data(old, new, seen.st_size)
            _copy_attributes(old, new)
            os.fchmod(new, stat.S_IMODE(seen.st_mode))
        finally:
            os.close(new)
    finally:
        os.close(old)


def _copy_data(old: int, new: int, size: int) -> None:
    os.ftruncate(new, size)
    where = 0
    while where < size:
        try:
            where = os.lseek(old, where, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # only a hole is left
                return
            raise
        end = os.lseek(old, where, os.SEEK_HOLE)
        while where < end:
            done = os.copy_file_range(old, new, min(end - where, _COPY_CHUNK), where, where)
            if not done:
                return
            where += done


def _copy_attributes(old: int, new: int) -> None:
    for name in os.listxattr(old):
        if name.startswith("user.") and not name.startswith(_OVERLAY):
            os.setxattr(new, name, os.getxattr(old, name))


def _is_opaque(folder: int) -> bool:
    try:
        return os.getxattr(folder, _OPAQUE) == b"y"
    except OSError:
        return False


def _clear(name: str, folder: int) -> None:
    """Remove what has this name in a folder out of the agent's reach."""
    mode = _mode(name, folder)
    if mode is None:
        return
    if stat.S_ISDIR(mode):
        remove_tree(Path(f"/proc/self/fd/{folder}") / name)
    else:
        os.unlink(name, dir_fd=folder)


def _mode(name: str, folder: int) -> int | None:
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return None


def _readable(name: str, above: int | None) -> int:
    """A folder's descriptor."""
    try:
        return os.open(name, _READ_FOLDER, dir_fd=above)
    except PermissionError:
        return _unlocked(name, above)


def _unlocked(name: str, above: int | None) -> int:
    """A folder's or file's descriptor, after giving back to its user what an agent may have taken away."""
    path = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
    try:
        mode = os.fstat(path).st_mode
        if not stat.S_ISDIR(mode) and not stat.S_ISREG(mode):
            raise OSError(errno.ENOTDIR, "is neither a folder nor a file", name)
        wanted = 0o700 if stat.S_ISDIR(mode) else 0o600
        if mode & wanted != wanted:
            Path(f"/proc/self/fd/{path}").chmod(stat.S_IMODE(mode) | wanted)
        return os.open(f"/proc/self/fd/{path}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    finally:
        os.close(path)


def _names(folder: int) -> Iterator[str]:
    """What is in it, read at once."""
    with os.scandir(folder) as entries:
        return iter([entry.name for entry in entries])


def _go_down(name: str, open_now: list[int]) -> None:
    if len(open_now) > DEEPEST:
        raise OSError(errno.ELOOP, f"folders lie more than {DEEPEST} deep", name)
    open_now.append(_readable(name, open_now[-1]))


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
