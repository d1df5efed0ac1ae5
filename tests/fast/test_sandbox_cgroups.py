import os

import pytest

from headrace.actors.sandboxes.cgroups import Group, Parents, find_controllers, remove_group
from headrace.platform.contracts import BoxLimits

LIMITS = BoxLimits(memory_mb=100, cpus=1.5, pids=10)


def mount(number, root, folder, kind, options):
    return f"{number} 1 0:{number} {root} {folder} rw,relatime shared:1 - {kind} {kind} rw,{options}\n"


def test_version_1_below_the_own_group_of_each_controller(tmp_path):
    for name in ("memory/mine", "pids", "cpu,cpuacct/mine"):
        (tmp_path / name).mkdir(parents=True)
    mounts = mount(1, "/", tmp_path / "memory", "cgroup", "memory")
    mounts += mount(2, "/", tmp_path / "pids", "cgroup", "pids")
    mounts += mount(3, "/", tmp_path / "cpu,cpuacct", "cgroup", "cpu,cpuacct")
    mounts += mount(4, "/", tmp_path / "unified", "cgroup2", "nsdelegate")
    own = "5:memory:/mine\n4:pids:/\n3:cpu,cpuacct:/mine\n1:name=systemd:/\n0::/\n"
    parents = find_controllers(mounts, own)
    folders = {"memory": "memory/mine", "pids": "pids", "cpu": "cpu,cpuacct/mine"}
    assert parents.folders == {name: tmp_path / path for name, path in folders.items()}
    assert set(parents.version.values()) == {1}


def test_version_2_in_the_nearest_group_that_passes_its_controllers_on(tmp_path):
    unified = tmp_path / "unified"
    own = unified / "user/app/mine"
    own.mkdir(parents=True)
    for folder, text in ((unified, "memory pids cpu"), (own.parent, "memory pids"), (own, "")):
        (folder / "cgroup.subtree_control").write_text(text)
    parents = find_controllers(mount(1, "/", unified, "cgroup2", "nsdelegate"), "0::/user/app/mine\n")
    assert parents.folders == {"memory": own.parent, "pids": own.parent}
    assert parents.controllers == {"memory", "pids"}
    assert set(parents.version.values()) == {2}


def test_a_container_that_sees_its_own_group_as_the_root(tmp_path):
    (tmp_path / "memory").mkdir()
    mounts = mount(1, "/docker/abc", tmp_path / "memory", "cgroup", "memory")
    assert find_controllers(mounts, "5:memory:/docker/abc\n").folders == {"memory": tmp_path / "memory"}


def test_where_no_group_can_be_made_there_is_none(tmp_path):
    mounts = mount(1, "/", tmp_path / "absent", "cgroup", "memory") + mount(2, "/", "/proc", "cgroup", "pids")
    assert find_controllers(mounts, "5:memory:/\n4:pids:/\n0::/\n").controllers == set()
    assert find_controllers("", "").controllers == set()


FILES = {
    1: {
        "memory.limit_in_bytes": "104857600",
        "memory.memsw.limit_in_bytes": "104857600",
        "pids.max": "12",
        "cpu.cfs_period_us": "100000",
        "cpu.cfs_quota_us": "150000",
    },
    2: {"memory.max": "104857600", "memory.swap.max": "0", "pids.max": "12", "cpu.max": "150000 100000"},
}


@pytest.mark.parametrize("number", [1, 2])
def test_limits_are_written_and_memory_kills_are_seen_once(tmp_path, number, monkeypatch):
    names = ("memory", "pids", "cpu")
    events = tmp_path / "box" / ("memory.oom_control" if number == 1 else "memory.events")
    made = os.mkdir

    def make_with_files(path, *args, **kwargs):  # as the kernel does
        made(path, *args, **kwargs)
        for name in FILES[number]:
            (tmp_path / "box" / name).touch()
        events.write_text("oom_kill 0\n")

    monkeypatch.setattr(os, "mkdir", make_with_files)
    group = Group(Parents(dict.fromkeys(names, tmp_path), dict.fromkeys(names, number)), "box", LIMITS)
    assert {name: (tmp_path / "box" / name).read_text() for name in FILES[number]} == FILES[number]
    assert group.paths == [tmp_path / "box"]
    assert not group.memory_kill()
    events.write_text("oom_kill_disable 0\noom_kill 2\n")
    assert group.memory_kill()
    assert not group.memory_kill()


def test_a_group_that_cannot_be_limited_is_not_left_behind(tmp_path):
    with pytest.raises(FileNotFoundError):
        Group(Parents({"pids": tmp_path}, {"pids": 1}), "box", LIMITS)
    assert not (tmp_path / "box").exists()
    remove_group(tmp_path / "box")
