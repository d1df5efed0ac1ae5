import os
import stat

import pytest

from headrace.actors.sandboxes.layers import copy_upper
from headrace.actors.sandboxes.trees import DEEPEST, copy_layer, remove_tree, used_bytes

MANY = 1 << 40


def files(folder):
    """Paths of files below a folder, with what is in them."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def whiteout(path):
    os.mknod(path, stat.S_IFCHR, 0)


def is_whiteout(path):
    found = path.lstat()
    return stat.S_ISCHR(found.st_mode) and found.st_rdev == 0


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    return folder


def deep(folder, levels):
    """A tree deeper than any path may be long."""
    here = os.open(folder, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir("d" * 20, dir_fd=here)
        below = os.open("d" * 20, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(os.open("last", os.O_CREAT | os.O_WRONLY, dir_fd=here))
    os.close(here)


def test_a_copy_keeps_modes_times_links_and_holes(source, tmp_path):
    (source / "sub").mkdir(mode=0o711)
    (source / "sub/tool").write_bytes(b"#!\n")
    (source / "sub/tool").chmod(0o751)
    (source / "link").symlink_to("/nowhere")
    os.mkfifo(source / "pipe")
    with (source / "hole").open("wb") as file:
        file.seek(50 << 20)
        file.write(b"end")
    os.setxattr(source / "sub/tool", "user.note", b"kept")
    os.utime(source / "sub/tool", ns=(1, 2))
    copy_layer(source, tmp_path / "copy")
    copy = tmp_path / "copy"
    assert stat.S_IMODE((copy / "sub").stat().st_mode) == 0o711
    tool = (copy / "sub/tool").stat()
    assert (stat.S_IMODE(tool.st_mode), tool.st_mtime_ns) == (0o751, 2)
    assert os.getxattr(copy / "sub/tool", "user.note") == b"kept"
    assert (copy / "link").readlink().as_posix() == "/nowhere"
    assert stat.S_ISFIFO((copy / "pipe").stat().st_mode)
    assert (copy / "hole").stat().st_size == (50 << 20) + 3
    assert (copy / "hole").stat().st_blocks * 512 < 1 << 20
    assert (copy / "hole").read_bytes().endswith(b"\0end")


def test_layers_merge_as_an_overlay_shows_them(source, tmp_path):
    target = tmp_path / "target"
    for path, text in {"same/a": "old", "same/b": "old", "emptied/c": "old", "gone": "old", "turned/d": "old"}.items():
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        (target / path).write_text(text)
    (source / "same").mkdir()
    (source / "same/a").write_text("new")
    (source / "emptied").mkdir()
    os.setxattr(source / "emptied", "user.overlay.opaque", b"y")
    whiteout(source / "gone")
    (source / "turned").write_text("a file now")
    copy_layer(source, target)
    assert files(target) == {"same/a": b"new", "same/b": b"old", "turned": b"a file now"}
    assert is_whiteout(target / "gone"), "it must hide what lies further down"
    assert os.getxattr(target / "emptied", "user.overlay.opaque") == b"y"


def test_a_folder_where_a_file_was_lets_nothing_show_through(source, tmp_path):
    target = tmp_path / "target"
    target.mkdir()
    (target / "a").write_text("a file")
    whiteout(target / "b")
    (source / "a").mkdir()
    (source / "b").mkdir()
    copy_layer(source, target)
    for name in ("a", "b"):
        assert os.getxattr(target / name, "user.overlay.opaque") == b"y"


def test_nothing_follows_a_link(source, tmp_path):
    host = tmp_path / "host"
    host.mkdir()
    (host / "secret").write_text("secret" * 10_000)
    (source / "folder").symlink_to(host)
    (source / "file").symlink_to(host / "secret")
    assert used_bytes([source], MANY) < 20_000
    copy_layer(source, tmp_path / "copy")
    assert (tmp_path / "copy/folder").is_symlink()
    assert (tmp_path / "copy/file").is_symlink()
    remove_tree(source)
    assert files(host) == {"secret": b"secret" * 10_000}
    (tmp_path / "top").symlink_to(host)
    with pytest.raises(OSError, match="neither"):
        remove_tree(tmp_path / "top")
    with pytest.raises(OSError, match="directory"):
        used_bytes([tmp_path / "top"], MANY)


def test_use_counts_blocks_and_entries_and_stops_early(source):
    (source / "sub").mkdir()
    (source / "sub/a").write_bytes(b"x" * 300_000)
    assert 300_000 <= used_bytes([source], MANY) < 330_000
    for number in range(500):
        (source / f"empty-{number}").touch()
    assert used_bytes([source], MANY) > 2_000_000, "files without bytes are as good as free"
    assert used_bytes([source], 1000) < 310_000


def test_a_tree_that_goes_too_deep_is_refused_but_removed(source, tmp_path):
    deep(source, DEEPEST + 300)
    with pytest.raises(OSError, match="deep"):
        used_bytes([source], MANY)
    with pytest.raises(OSError, match="deep"):
        copy_layer(source, tmp_path / "copy")
    remove_tree(source)
    assert not source.exists()
    remove_tree(source)


def test_what_an_agent_closed_is_removed_and_copied_all_the_same(source, tmp_path):
    (source / "shut/in").mkdir(parents=True)
    (source / "shut/in/file").write_text("text")
    (source / "shut/in/file").chmod(0)
    (source / "shut/in").chmod(0)
    (source / "shut").chmod(0)
    copy_layer(source, tmp_path / "copy")
    assert stat.S_IMODE((tmp_path / "copy/shut").stat().st_mode) in (0, 0o700)
    remove_tree(tmp_path / "copy")
    remove_tree(source)
    assert not source.exists()
    assert not (tmp_path / "copy").exists()


def test_names_of_one_file_stay_names_of_one_file(source, tmp_path):
    (source / "sub").mkdir()
    (source / "sub/a").write_bytes(b"x" * 1_000_000)
    for number in range(40):
        os.link(source / "sub/a", source / f"link-{number}")
    assert used_bytes([source], MANY) < 1_200_000
    assert copy_layer(source, tmp_path / "copy", 1_200_000) < 1_200_000
    copies = [path.stat() for path in (tmp_path / "copy").rglob("*") if path.is_file()]
    assert len(copies) == 41
    assert len({found.st_ino for found in copies}) == 1
    assert files(tmp_path / "copy") == files(source)


def test_a_layer_over_its_limit_is_not_copied_and_leaves_nothing(tmp_path):
    upper, target = tmp_path / "upper", tmp_path / "target"
    for name in ("workspace", "tmp"):
        (upper / name).mkdir(parents=True)
        (upper / name / "file").write_bytes(b"x" * 600_000)
    with pytest.raises(OSError, match="over its disk"):
        copy_upper((), upper, target, 1_000_000)
    assert not target.exists()
    copy_upper((), upper, target, 1_300_000)
    assert files(target) == files(upper)
