import os
import signal
import subprocess
import sys

import msgspec

from headrace.actors.sandboxes.reaping import LISTED_GROUPS, MARKER, OwnedFolder, Owner, box_folder, reap

OWNS = """
import sys, time
from pathlib import Path
from headrace.actors.sandboxes.reaping import OwnedFolder, box_folder
owned = OwnedFolder(Path(sys.argv[1]))
for number in (1, 2):
    box_folder(owned.path, number).mkdir()
(owned.path / "s1").mkdir()
print(owned.path, flush=True)
time.sleep(600)
"""


def start_owner(state):
    owner = subprocess.Popen([sys.executable, "-c", OWNS, str(state)], stdout=subprocess.PIPE, text=True)
    return owner, owner.stdout.readline().strip()


def end(process):
    process.kill()
    process.wait()
    if process.stdout:
        process.stdout.close()


def test_an_owner_is_known_by_boot_number_and_beginning():
    me = Owner.this()
    assert Owner.named(str(me) + "-abc123") == me
    assert not me.is_dead()
    assert msgspec.structs.replace(me, began=me.began + 1).is_dead(), "another process with the same number"
    assert msgspec.structs.replace(me, pid=2**22 + 1).is_dead()
    assert msgspec.structs.replace(me, boot="0" * 12).is_dead(), "of a boot before this one"
    elsewhere = msgspec.structs.replace(me, namespace=me.namespace + 1, pid=2**22 + 1)
    assert not elsewhere.is_dead(), "what cannot be seen is not called dead"


def test_the_dead_are_removed_and_the_living_spared(tmp_path):  # case X17
    state = tmp_path / "state"
    own = OwnedFolder(state)
    box_folder(own.path, 1).mkdir()
    living, its = start_owner(state)
    dead, left = start_owner(state)
    end(dead)
    try:
        assert reap(state) == 2
        assert not os.path.lexists(left)
        assert os.path.lexists(its)
        assert own.path.is_dir()
        assert reap(state) == 0
    finally:
        end(living)
    assert reap(state) == 2
    own.remove()
    own.remove()
    assert list(state.iterdir()) == []


def test_the_number_of_a_dead_owner_may_be_another_process_s(tmp_path):
    """The lock decides: a folder that names this very process, but that nobody holds, is nobody's."""
    owned = OwnedFolder(tmp_path)
    name = owned.path.name
    owned.remove()
    (tmp_path / name / "b1").mkdir(parents=True)
    (tmp_path / (name + ".lock")).touch()
    assert reap(tmp_path) == 1
    assert list(tmp_path.iterdir()) == []


def test_groups_and_marked_processes_go_with_a_box(tmp_path):
    state, group = tmp_path / "state", tmp_path / "group"
    owner, left = start_owner(state)
    box = box_folder(tmp_path / left, 1)
    group.mkdir()
    (box.parent / LISTED_GROUPS).write_text(f"{group}\n{tmp_path / 'gone'}\n")
    daemon = subprocess.Popen(["sleep", "600"], env={MARKER: str(box)})
    other = subprocess.Popen(["sleep", "600"], env={MARKER: str(box) + "0"})
    try:
        end(owner)
        assert reap(state) == 2
        assert daemon.wait(10) == -signal.SIGKILL
        assert other.poll() is None
        assert not group.exists()
    finally:
        end(daemon)
        end(other)


def test_there_may_be_nothing_at_all(tmp_path):
    assert reap(tmp_path / "absent") == 0


def test_a_lock_that_a_child_of_the_dead_inherited_keeps_nothing(tmp_path):  # case X17
    forks = OWNS.replace("print(", "import os\nif os.fork() == 0:\n    time.sleep(600)\nprint(")
    argv = [sys.executable, "-c", forks, str(tmp_path)]
    owner = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, start_new_session=True)
    left = owner.stdout.readline().strip()
    try:
        assert reap(tmp_path) == 0
        end(owner)
        assert reap(tmp_path) == 2
        assert not os.path.lexists(left)
        assert list(tmp_path.iterdir()) == []
    finally:
        os.killpg(owner.pid, signal.SIGKILL)
