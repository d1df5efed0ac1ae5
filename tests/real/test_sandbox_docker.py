"""What only Docker's boxes do, on a real daemon of the session's own."""

import asyncio
import contextlib
import gc
import hashlib
import os
import subprocess
import sys
import textwrap
import time

import docker
import pytest
from box_kinds import provider
from docker_daemon import IMAGE, DockerDaemon, root_files

from headrace.actors.sandboxes import docker as docker_provider
from headrace.actors.sandboxes import docker_box
from headrace.actors.sandboxes.docker import BOX, PROVIDER, DockerProvider, why_not
from headrace.platform.config.sandbox import SandboxConfig
from headrace.platform.errors import ConfigError, SandboxDied

LIMIT_S = 20.0
PATIENCE_S = 30.0


@pytest.fixture
def client(docker_host):
    client = docker.APIClient(base_url=docker_host)
    yield client
    client.close()


@pytest.fixture
async def boxes(docker_host, tmp_path):
    one = provider("docker", tmp_path)
    yield one
    await one.close()


def containers(client, **filters):
    return client.containers(all=True, filters={"label": BOX, **filters})


async def until(condition, why):
    end_s = time.monotonic() + PATIENCE_S
    while not await asyncio.to_thread(condition):
        assert time.monotonic() < end_s, why
        await asyncio.sleep(0.05)


class TestRefusals:
    def test_an_image_that_is_not_there_is_refused_by_name(self, docker_host, tmp_path):
        with pytest.raises(ConfigError, match=r"no image 'nowhere/nothing:1'.*docker pull nowhere/nothing:1"):
            provider("docker", tmp_path, image="nowhere/nothing:1")
        with pytest.raises(ConfigError, match=r"sandbox\.image"):
            DockerProvider(SandboxConfig(mode="docker"), tmp_path)

    def test_an_image_with_volumes_is_refused(self, client, tmp_path):
        """What is written to a volume is neither limited nor in a snapshot."""
        client.import_image_from_data(b"\0" * 10240, repository="with-volume", tag="1", changes="VOLUME /data")
        with pytest.raises(ConfigError, match=r"declares volumes \(/data\)"):
            provider("docker", tmp_path, image="with-volume:1")

    def test_why_not(self, docker_host, tmp_path, monkeypatch):
        assert why_not() == ""
        monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
        assert f"{tmp_path}/none.sock" in why_not() and "start Docker" in why_not()
        with pytest.raises(ConfigError, match="start Docker, or set DOCKER_HOST"):
            provider("docker", tmp_path)
        monkeypatch.setenv("DOCKER_HOST", "ssh://somewhere")
        assert "ssh://somewhere" in why_not()


class TestContainer:
    async def test_it_is_confined_as_declared(self, boxes, client):
        await boxes.create()
        (found,) = containers(client)
        about = client.inspect_container(found["Id"])
        host, config = about["HostConfig"], about["Config"]
        assert host["CapDrop"] == ["ALL"] and "no-new-privileges" in host["SecurityOpt"]
        assert (host["NetworkMode"], host["Privileged"], host["AutoRemove"]) == ("none", False, True)
        assert (host["Memory"], host["MemorySwap"]) == (512 << 20, 512 << 20)
        assert (host["NanoCpus"], host["PidsLimit"], host["Binds"]) == (10**9, 66, None)
        assert {limit["Name"]: limit["Hard"] for limit in host["Ulimits"]}["fsize"] == 64 << 20
        assert (config["User"], config["StdinOnce"], config["Volumes"]) == ("1000:1000", True, None)
        assert host["LogConfig"]["Type"] == "none", "the daemon keeps what commands print"

    async def test_the_digest_names_the_image_and_its_root(self, boxes, client):
        about = client.inspect_image(IMAGE)
        layers = hashlib.sha256("\n".join(about["RootFS"]["Layers"]).encode()).hexdigest()
        assert boxes.image_digest == f"{about['Id']};rootfs=sha256:{layers}"

    async def test_a_workspace_is_copied_in(self, docker_host, tmp_path):
        folder = tmp_path / "workspace"
        (folder / "sub").mkdir(parents=True)
        (folder / "sub" / "file").write_bytes(b"from here")
        (folder / "link").symlink_to("/etc/hostname")
        one = provider("docker", tmp_path / "state", workspace=str(folder))
        box = await one.create()
        said = await box.run("cat sub/file; echo; echo more >> sub/file; readlink link; stat -c %u sub", LIMIT_S)
        assert said.output == "from here\n/etc/hostname\n1000\n"
        assert (folder / "sub" / "file").read_bytes() == b"from here"
        fresh = await one.create()
        assert await fresh.read("sub/file") == b"from here", "boxes share a workspace"
        await one.close()

    async def test_an_image_without_bash(self, client, tmp_path):
        client.import_image_from_data(root_files(programs=()), repository="ash", tag="1", changes="ENV X=1")
        one = provider("docker", tmp_path, image="ash:1")
        box = await one.create()
        assert (await box.run("echo $X ${BASH_VERSION:-ash}", LIMIT_S)).output == "1 ash\n"
        late = await box.run("echo before; sleep 60", 0.3)
        assert (late.exit_code, late.output, late.limit) == (None, "before\n", "time")
        await box.run("cd /tmp; export Y=2", LIMIT_S)
        twin = await one.restore(await box.snapshot())
        assert (await twin.run("pwd; echo $Y", LIMIT_S)).output == "/tmp\n2\n"
        await one.close()

    async def test_a_granted_network_is_that_of_the_machine(self, docker_host, tmp_path):
        server = await asyncio.start_server(lambda read, write: write.close(), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        one = provider("docker", tmp_path, network=True)
        box = await one.create()
        assert (await box.run(f"bash -c 'echo > /dev/tcp/127.0.0.1/{port}'", LIMIT_S)).exit_code == 0
        await one.close()
        server.close()
        await server.wait_closed()


class TestFiles:
    async def test_names_and_sizes(self, boxes):
        box = await boxes.create()
        data = os.urandom(3_000_000)
        for name in ("deep/er/data.bin", "two words", "-n", "a'b\"c", "new\nline", "/tmp/elsewhere"):
            await box.write(name, data[:1000])
            assert await box.read(name) == data[:1000], name
        await box.write("large", data)
        assert await box.read("large") == data
        await box.write("large", b"")
        assert await box.read("large") == b"", "a shorter file keeps nothing of the longer one"

    async def test_limits_and_rights(self, docker_host, tmp_path):
        one = provider("docker", tmp_path, file_mb=1)
        box = await one.create()
        with pytest.raises(OSError, match="larger"):
            await box.write("large", bytes((1 << 20) + 1))
        await box.run("head -c 1000000 /dev/zero > a; mkdir d", LIMIT_S)
        for path in ("/etc/passwd", "/bin/sh", "/root/new", "d", "/proc/version"):
            with pytest.raises(OSError):
                await box.write(path, b"x")
        with pytest.raises(OSError):
            await box.read("/etc/shadow")
        with pytest.raises(OSError):
            await box.read("a\0b")
        await one.close()


class TestSnapshots:
    async def test_what_one_holds(self, boxes):
        box = await boxes.create()
        await box.run("echo one > a; echo two > /tmp/b; mkdir d; cd d; export WORD='x y'; rm -f ../gone", LIMIT_S)
        first = await box.snapshot()
        await box.run("echo changed > ../a; cd /; export WORD=other", LIMIT_S)
        twin = await boxes.restore(first)
        assert (await twin.run("pwd; cat ../a /tmp/b; echo $WORD", LIMIT_S)).output == "/workspace/d\none\ntwo\nx y\n"
        await twin.run("rm ../a", LIMIT_S)
        second = await twin.snapshot()
        third = await boxes.restore(second)
        assert (await third.run("ls ..; pwd", LIMIT_S)).output == "d\n/workspace/d\n", "a removed file came back"
        assert (await box.run("cat /workspace/a; pwd", LIMIT_S)).output == "changed\n/\n"

    async def test_a_discarded_one_leaves_no_image(self, boxes, client):
        box = await boxes.create()
        before = {image["Id"] for image in client.images(all=True)}
        await box.write("a", b"kept")
        parent = await box.snapshot()
        twin = await boxes.restore(parent)
        child = await twin.snapshot()
        await boxes.discard(parent)
        with pytest.raises(KeyError):
            await boxes.restore(parent)
        assert await twin.read("a") == b"kept", "a box that was restored from it goes on"
        third = await boxes.restore(child)
        assert await third.read("a") == b"kept", "so does a snapshot that was made of such a box"
        await boxes.discard(child)
        await boxes.discard("no such")
        await twin.close()
        await third.close()
        assert {image["Id"] for image in client.images(all=True)} == before


class TestEnds:
    async def test_a_killed_container_is_noticed_at_once(self, boxes, client):
        """Case E13."""
        box, other = await boxes.create(), await boxes.create()
        pending = asyncio.create_task(box.run("echo started; sleep 600", 600.0))
        (found,) = containers(client, id=box.sandbox_id.removeprefix("docker-"))
        await asyncio.to_thread(client.kill, found["Id"])
        began = time.monotonic()
        with pytest.raises(SandboxDied, match="gone"):
            await pending
        assert time.monotonic() - began < 1.0
        began = time.monotonic()
        for call in (
            lambda: box.run("true", LIMIT_S),
            lambda: box.read("a"),
            lambda: box.write("a", b""),
            box.snapshot,
        ):
            with pytest.raises(SandboxDied):
                await call()
        assert time.monotonic() - began < 1.0
        assert (await other.run("echo here", LIMIT_S)).output == "here\n"
        await box.close()

    async def test_memory_is_named(self, boxes):
        box = await boxes.create()
        hog = await box.run("perl -e '$x = \"a\" x (1 << 30)'", LIMIT_S)
        assert (hog.exit_code, hog.limit) == (None, "memory")
        failed = await box.run("exit 3", LIMIT_S)
        assert (failed.exit_code, failed.limit) == (3, ""), "one kill is told once"

    @pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")  # the SDK's, when there is no daemon
    async def test_a_daemon_that_goes_takes_its_boxes(self, docker_host, tmp_path, monkeypatch):
        with DockerDaemon() as daemon:
            monkeypatch.setenv("DOCKER_HOST", daemon.url)
            await lose_the_daemon(daemon, tmp_path)
        assert not daemon.left(), "what supervised its containers, or ran in them"
        assert not daemon.folder.exists()
        gc.collect()

    async def test_cancelled_starts_leave_nothing(self, docker_host, client, tmp_path):
        """Case X4: at moments all over a start, which takes a few hundred milliseconds."""
        one = provider("docker", tmp_path, max_boxes=2)
        await (await one.create()).close()
        images = {image["Id"] for image in client.images(all=True)}
        for delay_s in (0.0, 0.005, 0.02, 0.06, 0.12, 0.2, 0.3, 0.5):
            starting = asyncio.create_task(one.create())
            await asyncio.sleep(delay_s)
            starting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await (await starting).close()
        async with asyncio.timeout(PATIENCE_S):
            for box in [await one.create(), await one.create()]:
                await box.close()
        await one.close()
        assert not containers(client)
        assert {image["Id"] for image in client.images(all=True)} < images, "the template is still there"

    async def test_close_leaves_nothing(self, docker_host, client, tmp_path):
        before = {image["Id"] for image in client.images(all=True)}
        one = provider("docker", tmp_path)
        box = await one.create()
        await box.snapshot()
        await one.close()
        await one.close()
        assert not client.containers(all=True)
        assert {image["Id"] for image in client.images(all=True)} == before
        with pytest.raises(SandboxDied):
            await one.create()


async def lose_the_daemon(daemon, tmp_path):
    one = provider("docker", tmp_path)
    box = await one.create()
    pending = asyncio.create_task(box.run("sleep 600", 600.0))
    await box_is_busy(daemon)
    daemon.kill()
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(SandboxDied):
            await pending
        with pytest.raises(SandboxDied):
            await box.run("true", LIMIT_S)
        with pytest.raises(SandboxDied):
            await one.create()
        await one.close()


async def box_is_busy(daemon):
    """Until a command of the only box runs."""
    with contextlib.closing(docker.APIClient(base_url=daemon.url)) as client:
        (found,) = containers(client)
        await until(
            lambda: any("sleep" in " ".join(row) for row in client.top(found["Id"])["Processes"]), "no command runs"
        )


OWNER = """
    import asyncio, sys
    from pathlib import Path
    from headrace.actors.sandboxes.docker import DockerProvider
    from headrace.platform.config.sandbox import SandboxConfig

    async def main():
        one = DockerProvider(SandboxConfig(mode="docker", image="headrace-test"), Path(sys.argv[1]))
        idle, busy = await one.create(), await one.create()
        await idle.snapshot()
        print(one._name, flush=True)
        await busy.run("sleep 600", 600.0)

    asyncio.run(main())
"""


class TestReaper:
    async def test_what_a_dead_owner_left_is_removed(self, boxes, client, tmp_path):
        """Case X17: an idle box goes by itself, one that is busy and the images with the next reaper."""
        mine = await boxes.create()
        before = {image["Id"] for image in client.images(all=True)}
        command = [sys.executable, "-c", textwrap.dedent(OWNER), str(tmp_path / "other")]
        owner = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
        try:
            assert owner.stdout is not None
            name = (await owner.stdout.readline()).decode().strip()
            theirs = {"label": [BOX, f"{PROVIDER}={name}"]}
            assert len(client.containers(filters=theirs)) == 2
            assert await boxes.reap() == 0, "its owner is alive"
        finally:
            owner.kill()
            await owner.wait()
        await until(lambda: len(client.containers(all=True, filters=theirs)) <= 1, "the idle box is still there")
        await boxes.reap()
        await until(lambda: not client.containers(all=True, filters=theirs), "the busy box is still there")
        await boxes.reap()
        await until(lambda: {image["Id"] for image in client.images(all=True)} == before, "its images are still there")
        assert (await mine.run("echo here", LIMIT_S)).output == "here\n", "the reaper took a living box"


@pytest.mark.parametrize("script", ["while :; do echo x; sleep 0.2; done", "yes"], ids=["trickle", "flood"])
async def test_a_read_that_does_not_end_is_ended_with_its_process(boxes, monkeypatch, script):
    monkeypatch.setattr(docker_box, "_FILE_S", 3.0)
    box = await boxes.create()
    monkeypatch.setattr(docker_box, "_READ", f": held; {script}")
    began = time.monotonic()
    with pytest.raises(OSError, match=r"not done in time|more came"):
        await box.read("small")
    assert time.monotonic() - began < 6
    gone = await box.run("while grep -lqs ': [h]eld' /proc/[0-9]*/cmdline; do sleep 0.05; done", LIMIT_S)
    assert gone.exit_code == 0


async def test_a_daemon_of_another_machine_has_processes_ended_in_the_box(boxes, monkeypatch):
    """The host does not see them: the outer shell lists and ends them."""
    monkeypatch.setattr(docker_provider, "reachable", lambda pid, container: 0)
    box = await boxes.create()
    count = "c=0; for p in /proc/[0-9]*/comm; do read -r n < $p; [ $n = sleep ] && c=$((c+1)); done; echo $c"
    assert (await box.run("sleep 601 & :", LIMIT_S)).exit_code == 0
    done = await box.run("(sleep 602 & sleep 603 &); sleep 604", 1.0)
    assert done.limit == "time"
    assert (await box.run(count, LIMIT_S)).output == "1\n", "what was there before goes on, and nothing else"
    await box.run("export KEPT=1; cd /tmp", LIMIT_S)
    twin = await boxes.restore(await box.snapshot())
    assert (await box.run(count, LIMIT_S)).output == "0\n", "a snapshot ends all"
    for one in (box, twin):
        assert (await one.run("echo $KEPT $PWD", LIMIT_S)).output == "1 /tmp\n"
