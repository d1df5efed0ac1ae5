import fcntl
import os
import signal

import pytest

from headrace.actors.sandboxes.files import read_below, write_below

LIMIT = 1 << 20


@pytest.fixture
def box(tmp_path):
    folder = tmp_path / "box"
    (folder / "workspace").mkdir(parents=True)
    return folder


@pytest.fixture
def root(box):
    descriptor = os.open(box, os.O_PATH)
    yield descriptor
    os.close(descriptor)


def test_files_are_made_with_their_folders_and_replaced(root, box):
    write_below(root, "workspace/a/b/c.bin", b"longer", LIMIT)
    write_below(root, "/workspace/a/b/c.bin", b"new", LIMIT)
    assert (box / "workspace/a/b/c.bin").read_bytes() == b"new"
    assert read_below(root, "workspace/a/../a//b/c.bin", LIMIT) == b"new"


def test_links_lead_nowhere_but_below_the_root(root, box, tmp_path):
    (tmp_path / "secret").write_bytes(b"secret")
    (box / "workspace/up").symlink_to("../../../../../../.." + str(tmp_path / "secret"))
    (box / "workspace/absolute").symlink_to(tmp_path / "secret")
    (box / "workspace/folder").symlink_to(tmp_path)
    for name in ("up", "absolute", "folder/secret"):
        with pytest.raises(OSError, match=r"."):
            read_below(root, f"workspace/{name}", LIMIT)
        with pytest.raises(OSError, match=r"."):
            write_below(root, f"workspace/{name}", b"changed", LIMIT)
    assert (tmp_path / "secret").read_bytes() == b"secret"
    (box / "etc").mkdir()
    (box / "etc/motd").write_bytes(b"inside")
    (box / "workspace/motd").symlink_to("/etc/motd")
    assert read_below(root, "workspace/motd", LIMIT) == b"inside"
    assert read_below(root, "../../workspace/motd", LIMIT) == b"inside"


@pytest.mark.parametrize("path", ["self/status", "sys/kernel/hostname", "kcore", "1/environ"])
def test_files_by_which_a_kernel_is_read_or_set_are_none(path):
    """This process may read and set more than a box: a link into /proc must not borrow that."""
    proc = os.open("/proc", os.O_PATH)
    try:
        with pytest.raises(OSError, match=r"part of the kernel|denied|links|No such"):
            read_below(proc, path, LIMIT)
        with pytest.raises(OSError, match=r"part of the kernel|denied|links|No such"):
            write_below(proc, path, b"x", LIMIT)
    finally:
        os.close(proc)


def test_what_is_no_plain_file_is_refused_at_once(root, box):
    os.mkfifo(box / "workspace/pipe")
    for path in ("workspace", "workspace/pipe", "/", "", "workspace/."):
        with pytest.raises(OSError, match="plain file"):
            read_below(root, path, LIMIT)
        with pytest.raises(OSError, match="plain file"):
            write_below(root, path, b"", LIMIT)
    with pytest.raises(OSError, match="NUL"):
        read_below(root, "a\0b", LIMIT)
    with pytest.raises(FileNotFoundError):
        read_below(root, "workspace/missing", LIMIT)
    (box / "workspace/file").write_bytes(b"")
    with pytest.raises(NotADirectoryError):
        write_below(root, "workspace/file/below", b"", LIMIT)
    (box / "workspace/dangling").symlink_to("nowhere")
    with pytest.raises(FileExistsError):
        write_below(root, "workspace/dangling", b"", LIMIT)


def test_sizes_are_bounded(root, box):
    with pytest.raises(OSError, match="larger than 10 bytes"):
        write_below(root, "workspace/a", bytes(11), 10)
    assert not (box / "workspace/a").exists()
    write_below(root, "workspace/a", bytes(11), 11)
    with pytest.raises(OSError, match="larger than 10 bytes"):
        read_below(root, "workspace/a", 10)
    assert read_below(root, "workspace/a", 11) == bytes(11)


@pytest.mark.parametrize(
    "act", [lambda root: read_below(root, "workspace/f", 9), lambda root: write_below(root, "workspace/f", b"x", 9)]
)
def test_a_lease_on_a_file_is_not_waited_for(root, box, act):
    """Without its break a process that holds one keeps whoever opens the file waiting, for 45 seconds at least."""
    (box / "workspace/f").write_bytes(b"leased")
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)
    held = os.open(box / "workspace/f", os.O_RDWR)
    try:
        fcntl.fcntl(held, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        with pytest.raises(BlockingIOError):
            act(root)
    finally:
        os.close(held)
        signal.signal(signal.SIGIO, before)
    assert (box / "workspace/f").read_bytes() == b"leased"
