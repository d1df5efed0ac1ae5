"""What is particular to boxes of bubblewrap and to plain processes: their end, their owner's end, cancelled starts."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from box_kinds import provider

from headrace.actors.environments.sandboxed import SandboxedEnvironment
from headrace.actors.sandboxes import bubblewrap, files, layers
from headrace.actors.sandboxes.cgroups import Parents
from headrace.platform.errors import SandboxDied
from headrace.platform.records import Observation, Task
from headrace.platform.testing.conformance.sandbox_shell import SHELL_SUITE, SMALL

LIMIT_S = 20.0
SMALL_SETTINGS = msgspec.to_builtins(SMALL)
KINDS = ("bubblewrap", "unsafe-process")


@pytest.fixture
async def make(tmp_path):
    providers = []

    def new(kind="bubblewrap", state="state", **settings):
        providers.append(provider(kind, tmp_path / state, **settings))
        return providers[-1]

    yield new
    for one in providers:
        await one.close()


def naming(folder):
    """Processes with `folder` on their command line or in their environment."""
    found = set()
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.fsencode(folder) in (path / "cmdline").read_bytes() + (path / "environ").read_bytes():
                found.add(int(path.name))
    return found - {os.getpid()}


def groups(name):
    """Control groups with `name` in theirs."""
    return [name for _, below, _ in os.walk("/sys/fs/cgroup") for found in below if name in found]


async def until(condition, deadline_s=10.0):
    await asyncio.to_thread(_until, condition, time.monotonic() + deadline_s)


def _until(condition, deadline):
    while not condition():
        assert time.monotonic() < deadline, "it does not come about"
        time.sleep(0.02)


def start_owner(state, kind):
    """A process with two boxes, in which something runs."""
    argv = [sys.executable, "-c", OWNER, str(state), kind, str(Path(__file__).resolve().parents[1])]
    owner = subprocess.Popen(argv, stdout=subprocess.PIPE)
    owner.stdout.readline()
    return owner


async def test_a_box_is_not_root_and_sees_little(make):
    box = await make().create()
    said = (await box.run("id -u; hostname; ls / /root /home 2>&1; cat /etc/passwd; env", LIMIT_S)).output
    assert said.startswith("1000\nbox\n")
    assert "root:" not in said
    assert "HEADRACE" not in said
    for name in ("/root", "/home"):
        assert f"cannot access '{name}'" in said
    for path in ("/file", "/usr/file", "/dev/file", "/etc/file", "/proc/file"):
        assert (await box.run(f"touch {path}", LIMIT_S)).exit_code != 0, f"{path} was written"
    assert "keyring" not in (await box.run("cat /proc/keys", LIMIT_S)).output, "they name the host's containers"


async def test_a_killed_box_says_so_at_once_and_for_ever(make):  # case E13
    provider = make()
    box = await provider.create()
    pending = asyncio.create_task(box.run("sleep 600", 600.0))
    await asyncio.sleep(0.1)
    began = time.monotonic()
    box.kill("a test killed it")
    with pytest.raises(SandboxDied, match="a test killed it"):
        await pending
    assert time.monotonic() - began < 0.2
    for call in (box.run("true", 1.0), box.read("a"), box.write("a", b""), box.snapshot()):
        with pytest.raises(SandboxDied, match="a test killed it"):
            await call
    await box.close()
    await box.close()


async def test_a_shell_killed_from_outside_is_noticed_too(make):  # case E13
    box = await make().create()
    pending = asyncio.create_task(box.run("sleep 600", 600.0))
    await asyncio.sleep(0.1)
    began = time.monotonic()
    os.kill(box._parts.pid, signal.SIGKILL)
    with pytest.raises(SandboxDied, match="its shell was killed"):
        await pending
    assert time.monotonic() - began < 0.2
    with pytest.raises(SandboxDied):
        await box.read("a")


async def test_the_shell_cannot_be_killed_from_inside(make):
    box = await make().create()
    await box.run("kill -9 1", LIMIT_S)
    assert (await box.run("echo alive", LIMIT_S)).output == "alive\n"


@pytest.mark.parametrize("kind", KINDS)
async def test_starts_cancelled_anywhere_leave_nothing(make, tmp_path, kind):  # case X4
    provider = make(kind, max_boxes=1)
    first = await provider.create()
    await first.write("a", b"1")
    snapshot_id = await first.snapshot()
    await first.close()
    cancelled = 0
    for turn in range(60):
        start = asyncio.create_task(provider.restore(snapshot_id) if turn % 2 else provider.create())
        for _ in range(turn):
            await asyncio.sleep(0.0005 if turn % 3 else 0)
        start.cancel()
        try:
            await (await start).close()
        except asyncio.CancelledError:
            cancelled += 1
    assert cancelled > 10
    # There is room for one box again, and it works.
    async with asyncio.timeout(LIMIT_S):
        box = await provider.create()
    assert (await box.run("echo works", LIMIT_S)).output == "works\n"
    await box.close()
    owned = next((tmp_path / "state").glob("*.lock")).stem
    await provider.close()
    await until(lambda: not naming(tmp_path))
    assert list((tmp_path / "state").iterdir()) == []
    assert groups(owned) == []


@pytest.mark.parametrize("kind", KINDS)
async def test_a_provider_closed_during_a_start_leaves_nothing(make, tmp_path, kind):
    provider = make(kind, max_boxes=2)
    starts = [asyncio.create_task(provider.create()) for _ in range(4)]
    await asyncio.sleep(0.01)
    async with asyncio.timeout(LIMIT_S):
        await provider.close()
        ended = await asyncio.gather(*starts, return_exceptions=True)
    assert any(isinstance(end, SandboxDied) for end in ended)
    await until(lambda: not naming(tmp_path))
    assert list((tmp_path / "state").iterdir()) == []


OWNER = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from box_kinds import provider
async def main():
    boxes = provider(sys.argv[2], Path(sys.argv[1]))
    for _ in range(2):
        box = await boxes.create()
        await box.run("setsid sleep 600 & sleep 600 &", 10.0)
    print("up", flush=True)
    await box.run("sleep 600", 600.0)
asyncio.run(main())
"""


@pytest.mark.parametrize("kind", KINDS)
async def test_what_a_killed_owner_left_is_removed_and_the_living_spared(make, tmp_path, kind):  # case X17
    mine = await make(kind).create()
    await mine.write("a", b"mine")
    owner = await asyncio.to_thread(start_owner, tmp_path / "state", kind)
    try:
        theirs = [path for path in (tmp_path / "state").glob("*.lock") if f"-{owner.pid}-" in path.name]
        assert len(theirs) == 1
        folder = theirs[0].with_suffix("")
        assert await make(kind).reap() == 0
        assert len(naming(folder)) > 1
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()
    # No call is needed: a provider that is in use looks by itself.
    await until(lambda: not folder.exists() and not naming(folder), 15.0)
    assert not theirs[0].exists()
    assert groups(folder.name) == []
    assert await mine.read("a") == b"mine"
    assert (await mine.run("echo here", LIMIT_S)).output == "here\n"


async def test_a_box_begins_with_the_workspace_and_never_writes_it(make, tmp_path):
    base = tmp_path / "base"
    (base / "sub").mkdir(parents=True)
    (base / "sub/a").write_text("a")
    (base / "b").write_text("b")
    (base / "b").chmod(0o444)
    for kind in KINDS:
        provider = make(kind, workspace=str(base))
        box = await provider.create()
        await box.run("rm -r sub; echo more >> b; chmod u+w b; echo more >> b; mkdir sub; echo new > sub/c", LIMIT_S)
        twin = await provider.restore(await box.snapshot())
        assert (await twin.run("ls sub", LIMIT_S)).output == "c\n"
        assert await (await provider.create()).read("sub/a") == b"a"
    assert sorted(path.name for path in base.rglob("*")) == ["a", "b", "sub"]
    assert (base / "b").read_text() == "b"


async def test_long_chains_of_snapshots_are_merged(make):
    provider = make()
    box = await provider.create()
    await box.write("d/first", b"1")
    for turn in range(layers.MOST_LAYERS + 3):
        await box.write(f"d/{turn}", b"%d" % turn)
        await box.run(f"rm -f d/{turn - 1}", LIMIT_S)
        snapshot_id = await box.snapshot()
        await box.close()
        box = await provider.restore(snapshot_id)
    assert (await box.run("ls d", LIMIT_S)).output == f"{layers.MOST_LAYERS + 2}\nfirst\n"


async def test_files_of_the_kernel_are_not_reached_through_a_link(make):
    """The worker may write what no box may: a link must not lead it there."""
    box = await make().create()
    await box.run("ln -s /proc/sys/kernel/hostname name; ln -s /proc/1/environ e", LIMIT_S)
    await box.run("ln -s /proc/self/root/etc/shadow s", LIMIT_S)
    for path in ("name", "e", "s", "/proc/sys/kernel/hostname"):
        with pytest.raises(OSError, match=r"."):
            await box.read(path)
        with pytest.raises(OSError, match=r"."):
            await box.write(path, b"owned")


@pytest.mark.parametrize(
    "name", ["memory_is_bounded", "processes_are_bounded", "a_full_disk_ends_the_box", "any_text_runs"]
)
async def test_without_control_groups_the_limits_hold_too(make, name):
    def without():
        provider = make(**SMALL_SETTINGS)
        provider.parents = Parents({}, {})
        return provider

    await SHELL_SUITE[name](without)


async def test_memory_of_the_group_is_named_as_the_limit(make):
    provider = make(**SMALL_SETTINGS)
    if "memory" not in provider.parents.controllers:
        assert not os.access("/sys/fs/cgroup", os.W_OK), "there could be groups"
        return
    box = await provider.create()
    done = await box.run("exec perl -e '$x = \"x\" x 300_000_000; sleep 9'", LIMIT_S)
    assert (done.exit_code, done.limit) == (None, "memory")
    assert (await box.run("echo alive", LIMIT_S)).output == "alive\n"


async def test_files_that_have_no_name_any_more_count_too(make):
    box = await make(**SMALL_SETTINGS).create()
    hidden = "for (1..20) { open $f[$_], '>', 'gone'; unlink 'gone'; syswrite $f[$_], 'x' x 3_000_000 }; sleep 60"
    with pytest.raises(SandboxDied, match="disk"):
        await box.run(f'perl -e "{hidden}"'.replace("$", "\\$"), LIMIT_S)


@pytest.mark.parametrize("kind", KINDS)
async def test_files_without_bytes_count_too(make, kind):
    """What a file system holds is files as well as bytes, and the time that a look takes grows with them."""
    box = await make(kind, **SMALL_SETTINGS).create()
    many = "for $i (1..20_000) { open F, '>', \"$i\"; close F }; sleep 60"
    await box.write("many.pl", many.encode())
    with pytest.raises(SandboxDied, match="disk"):
        await box.run("perl many.pl", LIMIT_S)


class NoThreads(ThreadPoolExecutor):
    """The threads of a loop, in a test that must not need them."""

    def submit(self, fn, /, *args, **kwargs):
        raise AssertionError(f"{fn} was to run in the loop's threads")


@pytest.mark.parametrize("kind", KINDS)
async def test_the_threads_of_the_loop_are_left_to_others(make, kind):
    asyncio.get_running_loop().set_default_executor(NoThreads())
    provider = make(kind)
    box = await provider.create()
    await box.write("a/b", b"x")
    twin = await provider.restore(await box.snapshot())
    assert await twin.read("a/b") == b"x"
    assert (await twin.run("sleep 60", 0.1)).limit == "time"
    await provider.close()


async def test_there_is_no_network_unless_granted(make):
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    reach = f"exec 3<>/dev/tcp/127.0.0.1/{port}"
    async with server:
        assert (await (await make().create()).run(reach, LIMIT_S)).exit_code != 0
        assert (await (await make(network=True).create()).run(reach, LIMIT_S)).exit_code == 0


@pytest.mark.parametrize("kind", KINDS)
async def test_the_thread_of_a_cancelled_write_keeps_to_its_box(make, kind, tmp_path, monkeypatch):
    """A descriptor that is closed under it would be another file's by the time it writes."""
    box = await make(kind).create()
    write_below, begun, go_on, ended = files.write_below, threading.Event(), threading.Event(), threading.Event()

    def slow(root, path, data, limit):
        begun.set()
        assert go_on.wait(LIMIT_S)
        try:
            write_below(root, path, data, limit)
        finally:
            ended.set()

    monkeypatch.setattr(files, "write_below", slow)
    writing = asyncio.create_task(box.write("a/b", b"x"))
    assert await asyncio.to_thread(begun.wait, LIMIT_S)
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    other = tmp_path / "other"
    other.mkdir()
    opened = [os.open(other, os.O_PATH) for _ in range(8)]
    try:
        go_on.set()
        assert await asyncio.to_thread(ended.wait, LIMIT_S)
    finally:
        for each in opened:
            os.close(each)
    assert list(other.iterdir()) == []
    assert await box.read("a/b") == b"x"


class Plain(SandboxedEnvironment):
    name, version = "plain", "1"

    def tools(self):
        return ()

    async def _reset(self, task, seed):
        return Observation(())

    async def _step(self, message):
        raise NotImplementedError


@pytest.mark.parametrize("kind", KINDS)
async def test_the_agent_s_shell_cannot_forge_the_hash_of_the_workspace(make, kind):
    world = Plain()
    world.use_sandboxes(make(kind))
    await world.reset(Task("t", "plain", {}), 0)
    forge = "sha256sum() { echo fixed; }; find() { :; }; cd() { :; }; /usr/bin/env() { echo fixed; }"
    await world.box.run(f"{forge}; export -f sha256sum find cd /usr/bin/env", LIMIT_S)
    await world.box.run("mkdir /tmp/bin; printf '#!/bin/sh\\necho fixed\\n' > /tmp/bin/sha256sum", LIMIT_S)
    await world.box.run("chmod +x /tmp/bin/*; export PATH=/tmp/bin:$PATH HOME=/tmp LD_PRELOAD=/tmp/none", LIMIT_S)
    before = await world.workspace_hash()
    assert await world.workspace_hash() == before
    await world.box.write("new", b"1")
    assert await world.workspace_hash() != before
    await world.close()


@pytest.mark.parametrize(("user", "times"), [(0, 1), (1000, 0)])
async def test_root_without_groups_is_told_that_processes_are_not_limited(make, monkeypatch, caplog, user, times):
    monkeypatch.setattr(bubblewrap, "find_controllers", lambda mounts, own: Parents({}, {}))
    monkeypatch.setattr(os, "geteuid", lambda: user)
    make()
    assert caplog.text.count("no control group can limit the processes") == times
