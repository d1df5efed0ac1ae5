"""Control groups that are used again: only when they are as good as new, and always known to the reaper."""

import os
from pathlib import Path

import pytest

from headrace.actors.sandboxes.cgroups import Parents
from headrace.actors.sandboxes.group_pool import GroupPool
from headrace.actors.sandboxes.reaping import LISTED_GROUPS
from headrace.platform.contracts import BoxLimits

FILES = {
    "memory.max": "",
    "memory.swap.max": "",
    "memory.current": "1000\n",
    "memory.events": "oom_kill 0\n",
    "cgroup.procs": "",
}


@pytest.fixture
def pool(tmp_path, monkeypatch):
    """Groups that are folders with the files that a kernel puts there, and takes away."""
    made, removed = os.mkdir, os.rmdir

    def make(path, *args, **kwargs):
        made(path, *args, **kwargs)
        if "headrace-" in str(path):
            for name, text in FILES.items():
                (Path(path) / name).write_text(text)

    def remove(path, *args, **kwargs):
        for name in FILES if "headrace-" in str(path) else ():
            (Path(path) / name).unlink()
        removed(path, *args, **kwargs)

    monkeypatch.setattr(os, "mkdir", make)
    monkeypatch.setattr(os, "rmdir", remove)
    (tmp_path / "owned").mkdir()
    (tmp_path / "groups").mkdir()
    parents = Parents({"memory": tmp_path / "groups"}, {"memory": 2})
    return GroupPool(parents, tmp_path / "owned", BoxLimits(memory_mb=1))


def test_a_group_is_listed_before_it_is_there_and_used_again(pool, tmp_path):
    first, second = pool.take(), pool.take()
    listed = (tmp_path / "owned" / LISTED_GROUPS).read_text().splitlines()
    assert listed == [str(group.paths[0]) for group in (first, second)]
    (first.paths[0] / "memory.events").write_text("oom_kill 2\n")
    pool.give_back(first)
    assert pool.take() is first
    assert not first.memory_kill(), "what was killed in the last box is none of the next one's"
    pool.give_back(first)
    pool.give_back(second)
    pool.close()
    assert list((tmp_path / "groups").iterdir()) == []


@pytest.mark.parametrize(("name", "text"), [("cgroup.procs", "999999999\n"), ("memory.current", f"{1 << 19}\n")])
def test_a_group_that_is_not_as_good_as_new_is_removed(pool, tmp_path, name, text):
    group = pool.take()
    (group.paths[0] / name).write_text(text)
    pool.give_back(group)
    assert list((tmp_path / "groups").iterdir()) == []
    assert pool.take() is not group
