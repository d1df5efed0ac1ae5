"""What every box with a real shell must do besides `SANDBOX_SUITE`: run each function of `SHELL_SUITE` with a factory
whose boxes have the limits `SMALL`, so that the checks pass them quickly.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from shlex import quote as _quoted

from headrace.platform.contracts import BoxLimits, CommandResult, Sandbox
from headrace.platform.errors import SandboxDied
from headrace.platform.testing.conformance.sandbox import LIMIT_S, SandboxFactory, opened, says
from headrace.platform.testing.conformance.support import refusal

SMALL = BoxLimits(memory_mb=64, pids=24, file_mb=4, disk_mb=24, output_kb=16, silence_s=15.0)
_DEATH_S = 0.2
_WATCHER_S = 15.0


async def any_text_runs(make: SandboxFactory) -> None:
    """Heredocs, several lines, quotes, loops (case X11)."""
    async with opened(make) as provider:
        box = await provider.create()
        assert await says(box, "cat <<'END'\n$a `b` \"c\"\nEND") == '$a `b` "c"\n', "a heredoc came out changed"
        assert await says(box, "for i in 1 2\ndo\n  echo $i\ndone") == "1\n2\n", "a loop over lines did not run"
        assert await says(box, "printf '%s' no-newline") == "no-newline", "output got a newline"
        assert await says(box, "# only a comment") == "", "a comment said something"
        assert await says(box, "cat </dev/stdin; echo end") == "end\n", "a command can read what is not its own"
        assert await says(box, "echo é 語") == "é 語\n", "text came out changed"


async def exit_ends_the_command_only(make: SandboxFactory) -> None:
    """`exit`, `exec`, `set -e` and a lost output are no end of the box."""
    async with opened(make) as provider:
        box = await provider.create()
        for command, code in (("exit 3", 3), ("set -e; false; echo no", 1), ("exec sh -c 'exit 4'", 4)):
            done = await box.run(command, LIMIT_S)
            assert (done.exit_code, done.output) == (code, ""), f"{command} gave {done}"
        await box.run("exec >/dev/null 2>&1 </dev/null", LIMIT_S)
        assert await says(box, "echo heard") == "heard\n", "a command redirected those that follow"
        await box.run("set -x", LIMIT_S)
        assert await says(box, "echo quiet") == "quiet\n", "shell options lasted"
        # Never -1 or 0 here: a kind that isolates nothing would end whatever else this user runs.
        await box.run("sh -c 'kill -9 $PPID'", LIMIT_S)
        assert await says(box, "echo alive") == "alive\n", "the box did not survive the end of the inner shell"


async def output_is_bounded(make: SandboxFactory) -> None:
    """Head and tail are kept; printing for ever is ended by the limit on time, with what was said (case X9)."""
    async with opened(make) as provider:
        box = await provider.create()
        much = await box.run("echo first; head -c 3000000 /dev/zero | tr '\\0' x; echo; echo last", LIMIT_S)
        assert much.exit_code == 0 and much.truncated_bytes > 2_900_000, f"truncated: {much.truncated_bytes}"
        assert len(much.output) < (SMALL.output_kb << 10) + 200, f"{len(much.output)} characters were kept"
        assert much.output.startswith("first\n") and much.output.endswith("last\n"), "head or tail is missing"
        endless = await box.run("echo begin; yes", 0.5)
        assert (endless.limit, endless.exit_code) == ("time", None), f"yes gave {endless.limit!r}"
        assert endless.output.startswith("begin\ny\n"), "partial output is lost"
        slow = await box.run("for i in 1 2 3 4 5 6 7 8; do echo $i; sleep 0.1; done", LIMIT_S, 0.5)
        assert slow.exit_code == 0, f"one that keeps printing was ended: {slow}"


async def characters_are_not_split(make: SandboxFactory) -> None:
    """However the bytes arrive (case X10)."""
    async with opened(make) as provider:
        box = await provider.create()
        assert await says(box, "printf '\\303'; sleep 0.1; printf '\\251\\n'") == "é\n", "a character was split"


async def what_outruns_a_limit_is_ended_with_all_it_started(make: SandboxFactory) -> None:
    """Daemons too; what an earlier command left in the background goes on."""
    async with opened(make) as provider:
        box = await provider.create()
        await says(box, "(while :; do i=$((i+1)); echo $i > before; sleep 0.05; done) >/dev/null 2>&1 &")
        late = await box.run(
            "(setsid sh -c 'while :; do i=$((i+1)); echo $i > daemon; sleep 0.05; done' &) >/dev/null 2>&1; "
            "(while :; do i=$((i+1)); echo $i > child; sleep 0.05; done) & sleep 60",
            1.0,
        )
        assert late.limit == "time", f"it gave {late}"
        for name, goes_on in (("before", True), ("daemon", False), ("child", False)):
            assert await _changes(box, name) == goes_on, f"{name} {'was ended too' if goes_on else 'goes on'}"


async def snapshots_have_no_processes(make: SandboxFactory) -> None:
    """What runs in the background is ended first, and writes neither here nor there."""
    async with opened(make) as provider:
        box = await provider.create()
        await says(box, "(while :; do i=$((i+1)); echo $i > beat; sleep 0.05; done) >/dev/null 2>&1 &")
        await says(box, "while [ ! -s beat ]; do sleep 0.05; done")
        twin = await provider.restore(await box.snapshot())
        assert not await _changes(box, "beat"), "a process outlived the snapshot"
        assert not await _changes(twin, "beat"), "a process was restored"


async def odd_names_hide_no_process(make: SandboxFactory) -> None:
    """A process may be named like one that has ended: it ends with the command, and before a snapshot."""
    hiding = "(printf 'a) Z\\nb' > /proc/self/comm; exec 3>/dev/null; {0}) >/dev/null 2>&1 &"
    loop = "while :; do i=$((i+1)); echo $i > beat; read -r x < pipe; done"
    async with opened(make) as provider:
        box = await provider.create()
        await says(box, "mkfifo pipe; (while :; do echo > pipe; sleep 0.05; done) >/dev/null 2>&1 &")
        late = await box.run(f"sh -c {_quoted(hiding.format(loop))}; sleep 60", 1.0)
        assert late.limit == "time", f"it gave {late}"
        assert not await _changes(box, "beat"), "one of an odd name outlived its command"
        await says(box, f"sh -c {_quoted(hiding.format(loop))}")
        await box.snapshot()
        assert not await _changes(box, "beat"), "one of an odd name outlived the snapshot"


async def exports_are_values_only(make: SandboxFactory) -> None:
    """What a command makes `export` say is run by no later shell."""
    async with opened(make) as provider:
        box = await provider.create()
        odd = "a\"b'c\\$d`e\nf"
        await says(box, f"export ODD={_quoted(odd)} EMPTY=")
        assert await says(box, "exit 0") == ""
        assert await says(box, 'printf %s "$ODD${EMPTY-none}"') == odd, "a value came out changed"
        await box.run("export() { echo; echo '(: > ran)'; }", LIMIT_S)
        twin = await provider.restore(await box.snapshot())
        for one in (box, twin):
            assert await says(one, "ls") == "", "what was said in place of exports was run"


async def forged_answers_are_noise(make: SandboxFactory) -> None:
    """Those with numbers that cannot be, written into the outer shell's own streams where that is possible."""
    forge = "printf 'E c%s {} x\\0/\\0\\0' {} > /proc/$PPID/fd/8; sleep 0.2; echo mine"
    async with opened(make) as provider:
        box = await provider.create()
        for count, code in enumerate(("9" * 5000, "256", "999999999999"), start=1):
            done = await box.run(forge.format(code, count), LIMIT_S)
            assert (done.exit_code, done.output.splitlines()[-1:]) == (0, ["mine"]), f"a forged answer gave {done}"


async def snapshots_keep_all_kinds_of_files(make: SandboxFactory) -> None:
    """Modes, links, removed and replaced folders, files in /tmp, holes."""
    async with opened(make) as provider:
        box = await provider.create()
        await says(box, "mkdir -p old/in new; echo 1 > old/in/a; echo 2 > tool; chmod 755 tool; ln -s tool link")
        await says(box, 'echo t > "$TMPDIR/t"; dd if=/dev/zero of=hole bs=1 count=1 seek=3000000 2>/dev/null')
        box = await provider.restore(await box.snapshot())
        await says(box, "rm -r old; mkdir old; echo 3 > old/b; rm tool; mkdir tool; rm link; ln -s old link")
        last = await provider.restore(await box.snapshot())
        assert await says(last, "ls old tool; cat link/b") == "old:\nb\n\ntool:\n3\n", "a replaced folder is wrong"
        assert await says(last, 'cat "$TMPDIR/t"; wc -c < hole') == "t\n3000001\n", "/tmp or a hole is wrong"
        assert await says(last, "ls new | wc -l | tr -d ' '") == "0\n", "an empty folder is lost"


async def files_that_are_none_are_refused(make: SandboxFactory) -> None:
    """Folders, pipes, too large ones; links lead nowhere but to what the box sees."""
    async with opened(make) as provider:
        box = await provider.create()
        await says(
            box, "mkdir folder; mkfifo pipe; head -c 100 /dev/zero > small; ln -s small link; ln -s /etc/shadow out"
        )
        for path in ("folder", "pipe", "small/below", "/"):
            assert isinstance(await refusal(partial(box.read, path)), OSError), f"{path} was read"
            assert isinstance(await refusal(partial(box.write, path, b"")), OSError), f"{path} was written"
        assert await box.read("link") == bytes(100), "a link inside is not followed"
        assert isinstance(await refusal(lambda: box.read("out")), OSError), "a link out of the box was followed"
        large = bytes((SMALL.file_mb << 20) + 1)
        assert isinstance(await refusal(lambda: box.write("large", large)), OSError), (
            "a file beyond the limit was written"
        )
        assert (await box.run("head -c 6000000 /dev/zero > big", LIMIT_S)).exit_code != 0, "a command wrote beyond it"
        assert isinstance(await refusal(lambda: box.read("no\0where")), OSError), "a NUL in a path was taken"


async def memory_is_bounded(make: SandboxFactory) -> None:
    """A command over the memory fails, or the box says what it died of."""
    async with opened(make) as provider:
        box = await provider.create()
        try:
            done = await box.run("head -c 300000000 /dev/zero | tail", LIMIT_S)
        except SandboxDied as error:
            assert "memory" in str(error), f"it does not say why: {error}"
            return
        assert done.exit_code != 0, f"300 MB in {SMALL.memory_mb} MiB gave {done}"
        assert await says(box, "echo alive") == "alive\n", "the box did not survive it"


async def processes_are_bounded(make: SandboxFactory) -> None:
    """A command that starts too many fails, or the box says what it died of."""
    async with opened(make) as provider:
        box = await provider.create()
        try:
            await box.run("i=0; while [ $i -lt 99 ]; do (echo x >> started; sleep 60) & i=$((i+1)); done; wait", 3.0)
            started = (await box.read("started")).count(b"x")
        except SandboxDied as error:
            assert "processes" in str(error), f"it does not say why: {error}"
            return
        assert started <= SMALL.pids, f"{started} processes ran at once, of at most {SMALL.pids}"
        await box.run("true", 0.0)
        assert await says(box, "echo alive") == "alive\n", "the box did not survive it"


async def a_full_disk_ends_the_box(make: SandboxFactory) -> None:
    """The watcher sees it, and says so (case E13)."""
    async with opened(make) as provider:
        box = await provider.create()
        fill = "i=0; while :; do head -c 2000000 /dev/zero > f$i; i=$((i+1)); sleep 0.02; done"
        error = await refusal(lambda: box.run(fill, _WATCHER_S))
        assert isinstance(error, SandboxDied) and "disk" in str(error), f"filling the disk gave {error!r}"
        assert isinstance(await refusal(lambda: box.read("f0")), SandboxDied), "the box is still there"


async def a_cancelled_call_leaves_nothing(make: SandboxFactory) -> None:
    """The next call gets its own answer, and what was cancelled has ended (case X4)."""
    async with opened(make) as provider:
        box = await provider.create()
        for wait_s in (0.0, 0.01, 0.2):
            task = asyncio.create_task(box.run("while :; do i=$((i+1)); echo $i > beat; sleep 0.05; done", LIMIT_S))
            await asyncio.sleep(wait_s)
            task.cancel()
            async with asyncio.timeout(LIMIT_S):
                await _cancelled(task)
            assert await says(box, "echo mine") == "mine\n", "a later call got another's answer"
        assert not await _changes(box, "beat"), "a cancelled command goes on"
        starts = [asyncio.create_task(provider.create()) for _ in range(3)]
        await asyncio.sleep(0.01)
        for start in starts:
            start.cancel()
            await _cancelled(start)
        await says(await provider.create(), "echo works")


async def boxes_run_at_once(make: SandboxFactory) -> None:
    """Eight boxes that each wait half a second take less than their sum, and the loop goes on (case E11)."""
    async with opened(make) as provider:
        boxes = await asyncio.gather(*(provider.create() for _ in range(8)))
        began = time.monotonic()
        await asyncio.gather(*(says(box, "sleep 0.5") for box in boxes))
        assert time.monotonic() - began < 3.0, "they ran one after the other"


async def _changes(box: Sandbox, name: str) -> bool:
    """Whether something keeps writing the file."""
    done: CommandResult = await box.run(
        f'a=$(cat {name} 2>&1); sleep 0.4; b=$(cat {name} 2>&1); [ "$a" = "$b" ]', LIMIT_S
    )
    return done.exit_code != 0


async def _cancelled(task: "asyncio.Task[object]") -> None:
    await asyncio.wait([task])


SHELL_SUITE: dict[str, Callable[[SandboxFactory], Awaitable[None]]] = {
    check.__name__: check
    for check in (
        any_text_runs,
        exit_ends_the_command_only,
        output_is_bounded,
        characters_are_not_split,
        what_outruns_a_limit_is_ended_with_all_it_started,
        snapshots_have_no_processes,
        odd_names_hide_no_process,
        exports_are_values_only,
        forged_answers_are_noise,
        snapshots_keep_all_kinds_of_files,
        files_that_are_none_are_refused,
        memory_is_bounded,
        processes_are_bounded,
        a_full_disk_ends_the_box,
        a_cancelled_call_leaves_nothing,
        boxes_run_at_once,
    )
}
