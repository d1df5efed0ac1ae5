"""Attempts to get out of a box, each of them real, over every kind that protects. Each must fail, and say so here.

What stands for the host's secrets lies in the test's own folder, which belongs to the host like any other; commands are
given its true paths. `perl` calls the kernel where no program does.
"""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from box_kinds import PROTECTING, provider

import headrace
from headrace.platform import contracts
from headrace.platform.errors import SandboxDied

TOKEN = "4f1c-the-hosts-secret"
LIMIT_S = 20.0
UNBOUNDED = 1000
"""Processes: what a fork bomb without a limit passes at once, and what else happens on a machine does not."""
SOURCES = (Path(headrace.__file__).resolve(), Path(contracts.__file__).resolve())
HOSTS_PIDS = str(Path("/proc/self/ns/pid").readlink())
DISKS = [f"/dev/{path.name}" for path in Path("/sys/block").iterdir()]
EPERM, ESRCH, EACCES, EINVAL, ENOSYS = 1, 3, 13, 22, 38


@pytest.fixture(params=PROTECTING)
def mode(request):
    if request.param == "docker":
        request.getfixturevalue("docker_host")
    return request.param


@pytest.fixture
async def make(mode, tmp_path):
    """Makes providers of one kind, and closes them."""
    providers = []

    def new(**settings):
        providers.append(provider(mode, tmp_path / f"state-{len(providers)}", **settings))
        return providers[-1]

    yield new
    for one in providers:
        await one.close()


@pytest.fixture
def secret(tmp_path):
    """A file of the host, for everybody to read and write as far as its owner is concerned."""
    folder = tmp_path / "host"
    folder.mkdir()
    path = folder / "secret"
    path.write_text(TOKEN)
    path.chmod(0o666)
    folder.chmod(0o777)
    return path


@pytest.fixture
def bystander():
    """A process of the host with the secret in its environment and a mark in its arguments."""
    process = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)", "bystander-mark"], env={"SECRET": TOKEN}
    )
    yield process
    process.kill()
    process.wait()


def lies_there(path):
    return Path(path).exists()


def found(folder, name):
    """Whether files of that name lie below `folder`, which may be just being removed."""
    try:
        return next(folder.rglob(name), None) is not None
    except FileNotFoundError:
        return True


async def say(box, command, timeout_s=LIMIT_S):
    return (await box.run(command, timeout_s)).output


class TestFiles:
    async def test_files_of_the_host_cannot_be_read(self, make, secret):
        box = await make().create()
        for command in (
            f"cat {secret}",
            f"head -c 100 < {secret}",
            f"cp {secret} copy; cat copy",
            f"ln {secret} hard; cat hard",
            f"ln -s {secret} soft; cat soft",
            f"ln -s {secret.parent} there; cat there/{secret.name}",
            f"cat ../../../../../../../../../..{secret}",
            f"cat /proc/self/root{secret} /proc/1/root{secret} /proc/$PPID/root{secret} /proc/$PPID/cwd{secret}",
            f"find / -name {secret.name} -exec cat {{}} + 2>/dev/null",
        ):
            assert TOKEN not in await say(box, command), f"`{command}` read a file of the host"
        shadow = await box.run("cat /etc/shadow", LIMIT_S)
        assert shadow.exit_code != 0 and "root:" not in shadow.output

    async def test_the_home_folder_is_not_there(self, make):
        home = Path.home()
        names = {path.name for path in home.iterdir()}
        box = await make().create()
        seen = set((await say(box, f"ls -A {home} 2>/dev/null")).split())
        assert not seen & names, "the box sees the home folder of whoever runs it"

    async def test_files_of_the_host_cannot_be_written(self, make, secret):
        box = await make().create()
        await say(box, f"echo broken > {secret}; rm -f {secret}; mv {secret} moved; touch {secret.parent}/new")
        await say(box, f"mkdir -p {secret.parent}; chmod 000 {secret}; ln -s {secret} s; echo broken > s")
        assert secret.read_text() == TOKEN and sorted(path.name for path in secret.parent.iterdir()) == ["secret"]
        for system in ("/usr/bin/headrace-was-here", "/etc/headrace-was-here", "/headrace-was-here"):
            assert (await box.run(f"echo x > {system}", LIMIT_S)).exit_code != 0
            assert not lies_there(system)
        assert (await box.run("echo evil::0:0::/:/bin/sh >> /etc/passwd", LIMIT_S)).exit_code != 0

    async def test_links_lead_read_and_write_nowhere(self, make, secret):
        box = await make().create()
        await say(box, f"ln -s {secret} link; ln -s {secret.parent} folder; ln -s /etc/shadow shadow; ln -s link twice")
        climbing = "../" * 20 + str(secret).lstrip("/")
        for path in ("link", "twice", f"folder/{secret.name}", str(secret), climbing, "shadow"):
            with contextlib.suppress(OSError):
                assert TOKEN.encode() not in await box.read(path), f"read followed {path}"
                assert b"root:" not in await box.read(path)
        for path in ("link", "twice", f"folder/{secret.name}", "folder/new", str(secret), climbing):
            with contextlib.suppress(OSError):
                await box.write(path, b"broken")
            assert secret.read_text() == TOKEN, f"write followed {path}"
        assert [path.name for path in secret.parent.iterdir()] == ["secret"]
        assert (await box.run("echo here", LIMIT_S)).output == "here\n"

    async def test_what_is_no_file_is_not_read(self, make):
        """Neither waited for nor read without an end."""
        box = await make(file_mb=1).create()
        await say(box, "mkfifo pipe; mkdir folder; head -c 1000000 /dev/zero > a; cat a a > large")
        async with asyncio.timeout(LIMIT_S):
            for path in ("pipe", "folder", "/dev/zero", "/dev/stdin"):
                with pytest.raises(OSError):
                    await box.read(path)
            assert len(await box.read("a")) == 1_000_000

    async def test_the_grader_cannot_be_read(self, make, tmp_path):
        """Case X5: neither a file of the test nor headrace's own source."""
        grader = tmp_path / "grader.py"
        grader.write_text(f"ANSWER = {TOKEN!r}\n")
        box = await make().create()
        assert TOKEN not in await say(box, f"cat {grader}")
        for source in SOURCES:
            assert (await box.run(f"cat {source}", LIMIT_S)).exit_code != 0
        assert (await box.run("python3 -c 'import headrace.actors.episode'", LIMIT_S)).exit_code != 0

    async def test_writing_the_reward_file_changes_nothing(self, make, tmp_path):
        """Case X6: outside it cannot be written; inside it is a file like any other."""
        reward = tmp_path / "reward.txt"
        reward.write_text("0.0")
        box = await make().create()
        await say(box, f"mkdir -p {tmp_path}; echo 1.0 > {reward}; echo 1.0 > reward.txt; echo 1.0 > /tmp/reward.txt")
        with contextlib.suppress(OSError):
            await box.write(str(reward), b"1.0")
        assert reward.read_text() == "0.0"
        assert await box.read("reward.txt") == b"1.0\n"

    async def test_devices_of_the_host_are_not_there(self, make):
        box = await make().create()
        for device in (*DISKS, "/dev/mem", "/dev/kmsg", "/dev/kvm", "/dev/fuse"):
            assert (await box.run(f"head -c 1 < {device}", LIMIT_S)).exit_code != 0, f"{device} opens"
        await say(box, "mknod disk b 259 0; mknod mem c 1 1")
        for device in ("disk", "mem"):
            assert (await box.run(f"head -c 1 < {device}", LIMIT_S)).exit_code != 0, "a device node was made"


class TestOtherBoxes:
    async def test_files_of_another_box_are_out_of_reach(self, make):
        """Case X13."""
        one_provider = make()
        one, other = await one_provider.create(), await one_provider.create()
        await one.write("secret", TOKEN.encode())
        await say(one, f"echo {TOKEN} > /tmp/secret; echo {TOKEN} > $TMPDIR/secret")
        where = (await say(one, "pwd")).strip()
        for command in (f"cat {where}/secret /tmp/secret", "find / -name secret -exec cat {} + 2>/dev/null"):
            assert TOKEN not in await say(other, command)

    async def test_processes_of_another_box_are_out_of_reach(self, make):
        one_provider = make()
        one, other = await one_provider.create(), await one_provider.create()
        await say(one, "sleep 4321.25 & until grep -q sleep /proc/$!/comm; do :; done")
        (sleeper,) = [found for found in psutil.process_iter(["cmdline"]) if "4321.25" in (found.info["cmdline"] or [])]
        seen = await say(other, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
        assert "4321.25" not in seen
        await say(other, f"kill -9 {sleeper.pid}; kill -9 -{sleeper.pid}; echo tried")
        assert sleeper.is_running() and sleeper.status() != psutil.STATUS_ZOMBIE
        assert await say(one, "jobs -p >/dev/null; echo alive") == "alive\n"


class TestNetwork:
    async def test_no_server_of_the_host_is_reached(self, make, secret):
        arrived = []
        server = await asyncio.start_server(lambda read, write: (arrived.append(1), write.close()), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        local = await asyncio.start_unix_server(
            lambda read, write: (arrived.append(1), write.close()), str(secret.parent / "s")
        )
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams, socket.socket(socket.AF_UNIX) as abstract:
            datagrams.bind(("127.0.0.1", 0))
            datagrams.setblocking(False)
            abstract.bind(b"\0headrace-escape-%d" % os.getpid())
            abstract.listen()
            abstract.setblocking(False)
            box = await make().create()
            for there in ("127.0.0.1", "localhost"):
                tried = await box.run(f"bash -c 'echo hi > /dev/tcp/{there}/{port}'", LIMIT_S)
                assert tried.exit_code != 0
            await say(box, f"bash -c 'echo hi > /dev/udp/127.0.0.1/{datagrams.getsockname()[1]}'")
            for name in (f"\\0headrace-escape-{os.getpid()}", f"{secret.parent}/s"):
                done = await box.run(
                    f"perl -MSocket -e 'socket(S, PF_UNIX, SOCK_STREAM, 0) or exit 1;"
                    f' connect(S, pack_sockaddr_un("{name}")) or exit 1\'',
                    LIMIT_S,
                )
                assert done.exit_code != 0, f"the socket {name} was reached"
            with pytest.raises(BlockingIOError):
                abstract.accept()
            with pytest.raises(BlockingIOError):
                datagrams.recv(10)
        assert not arrived
        for one in (server, local):
            one.close()
            await one.wait_closed()

    async def test_no_other_host_is_reached(self, make):
        """An address for documentation; where there is no network the kernel says so at once."""
        box = await make().create()
        began = time.monotonic()
        assert (await box.run("bash -c 'echo hi > /dev/tcp/192.0.2.1/80'", LIMIT_S)).exit_code not in (0, None)
        assert time.monotonic() - began < LIMIT_S / 2, "it was sent, and nobody answered"


class TestProcesses:
    async def test_processes_of_the_host_are_not_seen(self, make, bystander):
        box = await make().create()
        for command in (
            "cat /proc/[0-9]*/cmdline | tr '\\0' ' '",
            f"cat /proc/{bystander.pid}/cmdline /proc/{os.getpid()}/cmdline | tr '\\0' ' '",
            f"cat /proc/[0-9]*/environ /proc/{bystander.pid}/environ | tr '\\0' '\\n'",
            "cat /proc/$PPID/environ /proc/1/environ | tr '\\0' '\\n'",
        ):
            said = await say(box, command)
            assert (
                TOKEN not in said and "bystander-mark" not in said and "-m pytest" not in said and "PYTEST" not in said
            ), command

    async def test_the_environment_of_whoever_runs_it_is_not_inherited(self, make, monkeypatch):
        monkeypatch.setenv("HEADRACE_ESCAPE_SECRET", TOKEN)
        box = await make().create()
        assert TOKEN not in await say(box, "env; export -p; cat /proc/self/environ")

    async def test_killing_the_parent(self, make, bystander):
        """The box may end itself; nothing else ends."""
        one_provider = make()
        box, other = await one_provider.create(), await one_provider.create()
        await say(box, f"kill -9 {bystander.pid}; kill -9 -{bystander.pid}")
        assert bystander.poll() is None, "that was a process of the host"
        commands = ["kill -9 $PPID"]
        seen = (await say(box, "readlink /proc/self/ns/pid")).strip()
        if seen.startswith("pid:[") and seen != HOSTS_PIDS:  # only there does -1 mean the box
            commands += ["kill -9 1", "kill -9 -1"]
        for command in commands:
            try:
                await say(box, f"{command}; echo survived")
            except SandboxDied:
                box = await one_provider.create()
        assert bystander.poll() is None
        assert await say(other, "echo here") == "here\n"

    async def test_no_descriptor_is_inherited(self, make, secret):
        with secret.open() as held, socket.socket() as connection:
            for one in (held, connection):
                os.set_inheritable(one.fileno(), True)
            box = await make().create()
            listed = await say(box, "ls -l /proc/self/fd")
        numbers = {int(line.split(" -> ")[0].split()[-1]) for line in listed.splitlines() if " -> " in line}
        assert {0, 1, 2} <= numbers <= {0, 1, 2, 3}, listed
        assert "secret" not in listed and "socket:" not in listed

    async def test_a_fork_bomb_is_bounded(self, make):
        one_provider = make(pids=24)
        box, other = await one_provider.create(), await one_provider.create()
        before, most = len(psutil.pids()), 0
        bomb = asyncio.create_task(box.run("b() { b | b & b; }; b; while :; do sleep 60 & done", 2.0))
        while not bomb.done():
            most = max(most, len(psutil.pids()))
            assert await say(other, "echo here") == "here\n", "another box suffers"
            await asyncio.sleep(0.05)
        assert most - before < UNBOUNDED, "or the machine began as much meanwhile"
        assert await (await asyncio.create_subprocess_exec("true")).wait() == 0, "the host suffers"
        with contextlib.suppress(SandboxDied):
            await bomb
            assert await say(box, "echo here") == "here\n"
        await box.close()
        assert await say(other, "echo here") == "here\n"

    async def test_a_storm_of_signals_to_the_shell_ends_the_storm(self, make):
        """SIGUSR1 tells the shell of a box to end the command that runs, and anything in the box may send it."""
        box = await make().create()
        storm = '$SIG{USR1} = "IGNORE"; $until = time + 30; kill USR1 => $ARGV[0] while time < $until'
        began = time.monotonic()
        await box.run(f"perl -e '{storm}' $$ storm-mark >/dev/null 2>&1 & sleep 5", LIMIT_S)
        assert await say(box, "echo here") == "here\n"
        assert "storm-mark" not in await say(box, "cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' '")
        assert time.monotonic() - began < LIMIT_S / 2
        await box.snapshot()

    async def test_background_processes_do_not_get_behind_a_snapshot(self, make):
        one_provider = make()
        box = await one_provider.create()
        ticker = "while :; do echo $((n += 1)) > beat; sleep 0.02; done"
        await say(box, f"({ticker}) & perl -e 'exit if fork; setpgrp; exit if fork; exec @ARGV' sh -c '{ticker}' &")
        await say(box, "until [ -s beat ]; do sleep 0.02; done")
        snapshot_id = await box.snapshot()
        twin = await one_provider.restore(snapshot_id)
        for one in (box, twin):
            before, after = (await say(one, "cat beat; echo then; sleep 0.3; cat beat")).split("then\n")
            assert before == after, "something still writes"


CALLS = {
    "ptrace": (16, "{pid}", 0, 0),
    "mount": ('"none"', '"."', '"tmpfs"', 0, 0),
    "umount2": ('"/no-such-mount"', 0),
    "pivot_root": ('"."', '"."'),
    "unshare": (0x10000000,),
    "setns": (0, 0),
    "setuid": (0,),
    "setgid": (0,),
    "sethostname": ('""', -1),
    "keyctl": (0, -3, 0),
    "bpf": (0, 0, 0),
    "perf_event_open": (0, 0, -1, -1, 0),
    "init_module": (0, 0, '""'),
    "kexec_load": (0, 0, 0, 0),
    "swapon": ('"."', 0),
    "settimeofday": (0, 0),
    "open_by_handle_at": (-1, 0, 0),
    "kill": ("{pid}", 9),
}
"""Calls to the kernel that only a way out needs; {pid} is a process of the host. One that is let through shows by its
errno, or by its success, and harms nothing."""


class TestPrivileges:
    @pytest.mark.parametrize("call", CALLS)
    async def test_the_kernel_refuses(self, make, bystander, call):
        seccomp = pytest.importorskip("pyseccomp")
        number = seccomp.resolve_syscall(seccomp.Arch.NATIVE, call)
        arguments = ", ".join(str(argument) for argument in CALLS[call]).replace("{pid}", str(bystander.pid))
        box = await make().create()
        program = f'@a = ({arguments}); $r = syscall({number}, @a); printf("%d %d\\n", $r, $!);'
        result, error = map(int, (await say(box, f"perl -e '{program}'")).split())
        refusals = [EPERM, EACCES, ENOSYS, ESRCH]
        if call in ("setuid", "setgid"):
            refusals.append(EINVAL)  # there is no such user in the box
        already = call in ("setuid", "setgid") and result == 0 and await say(box, "id -u") == "0\n"
        assert already or (result == -1 and error in refusals), f"{call}: {result}, errno {error}"
        assert bystander.poll() is None

    async def test_nothing_gives_privileges(self, make):
        box = await make().create()
        status = await say(box, "cat /proc/self/status")
        fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        assert int(fields["CapEff"], 16) == int(fields["CapPrm"], 16) == int(fields["CapBnd"], 16) == 0
        assert fields["NoNewPrivs"] == "1" and fields["Seccomp"] == "2"
        for path in ("sysrq-trigger", "sys/kernel/core_pattern", "sys/vm/overcommit_memory", "mtrr"):
            opened = await box.run(f"( : >> /proc/{path} ) && ! test -c /proc/{path}", LIMIT_S)
            assert opened.exit_code != 0, f"/proc/{path} opens for writing"
        for command in (
            "mount -t tmpfs none .",
            "unshare -U true",
            "unshare -m true",
            "chroot . true",
            "su -c true",
        ):
            assert (await box.run(f"{command} </dev/null", LIMIT_S)).exit_code != 0, command


class TestLimits:
    @pytest.mark.parametrize("where", [".", "${TMPDIR:-/tmp}", "/dev/shm"])
    async def test_filling_the_disk_ends_the_box(self, make, tmp_path, where):
        """At the limit, and within seconds; /dev/shm may have a smaller limit of its own, or not be there."""
        box = await make(disk_mb=16, file_mb=8, memory_mb=64).create()
        loop = "while head -c 1000000 /dev/zero > fill-$i; do i=$((i + 1)); sleep 0.01; done"
        fill = f"cd {where} || exit; i=0; {loop}; echo $i"
        began = time.monotonic()
        try:
            done = await box.run(f"({fill})", 30.0)
            assert where == "/dev/shm" and int(done.output.split()[-1] or 0) < 70, done
        except SandboxDied as error:
            assert "disk" in str(error) or "memory" in str(error)
        assert time.monotonic() - began < 15
        await box.close()
        until = time.monotonic() + LIMIT_S
        while found(tmp_path, "fill-*"):
            assert time.monotonic() < until, "what it wrote is still there"
            await asyncio.sleep(0.05)

    async def test_a_file_has_a_limit(self, make):
        box = await make(file_mb=1).create()
        await say(box, "head -c 5000000 /dev/zero > large; echo $?")
        assert int(await say(box, "wc -c < large")) <= 1 << 20
        assert await say(box, "echo here") == "here\n"

    async def test_memory_has_a_limit(self, make):
        box = await make(memory_mb=64).create()
        hog = await box.run("perl -e '$x = \"a\" x (512 << 20); print length $x'", LIMIT_S)
        assert str(512 << 20) not in hog.output and hog.exit_code != 0, hog
        assert await say(box, "echo here") == "here\n"

    async def test_processor_time_has_a_limit(self, make):
        box = await make(cpu_s=1).create()
        spun = await box.run("perl -e '1 while 1'", LIMIT_S)
        assert spun.exit_code != 0 and not spun.limit and spun.seconds < LIMIT_S / 2
        assert await say(box, "echo here") == "here\n"

    async def test_limits_cannot_be_raised(self, make):
        box = await make(file_mb=1).create()
        await say(box, "ulimit -f unlimited; ulimit -Hf unlimited; head -c 5000000 /dev/zero > large")
        assert int(await say(box, "wc -c < large")) <= 1 << 20


async def test_unsafe_process_protects_from_nothing(tmp_path, secret):
    """So that nobody takes it for a sandbox: the name says it, and so does this."""
    one_provider = provider("unsafe-process", tmp_path / "state")
    box = await one_provider.create()
    assert await say(box, f"cat {secret}") == TOKEN
    await say(box, f"echo broken > {secret}")
    assert secret.read_text() == "broken\n"
    await one_provider.close()
