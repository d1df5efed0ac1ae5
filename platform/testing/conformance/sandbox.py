"""What every `SandboxProvider` and its boxes must do. Run each function of `SANDBOX_SUITE` with a factory of yours;
those with real shells run `SHELL_SUITE` (sandbox_shell.py) as well.

The commands are those that any shell has: echo, cat, cd, export, pwd, true, false, sleep, rm.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from headrace.platform.contracts import Sandbox, SandboxProvider
from headrace.platform.errors import SandboxDied
from headrace.platform.testing.conformance.support import refusal

SandboxFactory = Callable[[], SandboxProvider]

LIMIT_S = 20.0


@asynccontextmanager
async def opened(make: SandboxFactory) -> AsyncIterator[SandboxProvider]:
    """A provider, closed at the end."""
    provider = make()
    try:
        yield provider
    finally:
        await provider.close()


async def says(box: Sandbox, command: str) -> str:
    """What a command prints that must succeed."""
    done = await box.run(command, LIMIT_S)
    assert done.exit_code == 0, f"{command} gave {done}"
    return done.output


async def commands_run(make: SandboxFactory) -> None:
    """Output and exit code come back; a failure is a result."""
    async with opened(make) as provider:
        box = await provider.create()
        said = await box.run("echo hello", LIMIT_S)
        assert (said.exit_code, said.output, said.limit) == (0, "hello\n", ""), f"echo hello gave {said}"
        failed = await box.run("false", LIMIT_S)
        assert failed.exit_code not in (0, None), f"false gave {failed}"
        unknown = await box.run("no-such-command-here", LIMIT_S)
        assert unknown.exit_code not in (0, None), f"an unknown command gave {unknown}"


async def a_command_that_does_not_parse_is_an_ordinary_error(make: SandboxFactory) -> None:
    """The box goes on afterwards (case X11)."""
    async with opened(make) as provider:
        box = await provider.create()
        broken = await box.run('echo "unclosed', LIMIT_S)
        assert broken.exit_code not in (0, None), f"an unclosed quote gave {broken}"
        assert await says(box, "echo still here") == "still here\n", "the box did not survive it"
        nul = await box.run("echo a\0b", LIMIT_S)
        assert nul.exit_code not in (0, None), f"a NUL in a command gave {nul}"


async def directory_and_variables_last(make: SandboxFactory) -> None:
    """From one command to the next, and over one that was ended."""
    async with opened(make) as provider:
        box = await provider.create()
        await box.write("deep/er/a.txt", b"found\n")
        await says(box, "cd deep/er")
        await says(box, "export COLOUR=blue")
        assert await says(box, "cat a.txt") == "found\n", "the directory did not last"
        assert await says(box, "echo $COLOUR") == "blue\n", "an exported variable did not last"
        await box.run("sleep 60", 0.2)
        assert await says(box, "cat a.txt") == "found\n", "the directory did not last over a time-out"
        assert await says(box, "echo $COLOUR") == "blue\n", "a variable did not last over a time-out"
        assert await box.read("deep/er/a.txt") == b"found\n", "relative paths of read begin at the workspace"


async def files_are_bytes(make: SandboxFactory) -> None:
    """What is written is read, seen by commands, and the other way round."""
    async with opened(make) as provider:
        box = await provider.create()
        data = bytes(range(256)) * 300
        await box.write("data.bin", data)
        assert await box.read("data.bin") == data, "a file does not come back byte for byte"
        await box.write("data.bin", b"")
        assert await box.read("data.bin") == b"", "a shorter file does not replace a longer one"
        await box.write("note.txt", b"one\n")
        assert await says(box, "cat note.txt") == "one\n", "a command does not see a written file"
        await says(box, "echo two > made.txt")
        assert await box.read("made.txt") == b"two\n", "a file that a command made is not read"
        error = await refusal(lambda: box.read("missing.txt"))
        assert isinstance(error, FileNotFoundError), f"reading a missing file raised {error!r}, not FileNotFoundError"


async def time_outs_are_results(make: SandboxFactory) -> None:
    """A command that outruns its limit, or is silent for too long, is an observation for the model (P27, case X9)."""
    async with opened(make) as provider:
        box = await provider.create()
        async with asyncio.timeout(LIMIT_S):
            late = await box.run("sleep 60", 0.2)
        assert late.exit_code is None, f"a killed command has no exit code, but {late}"
        assert late.limit == "time", f"the result says limit={late.limit!r}, not 'time'"
        assert await says(box, "echo alive") == "alive\n", "the box did not survive a time-out"
        async with asyncio.timeout(LIMIT_S):
            silent = await box.run("sleep 60", LIMIT_S, 0.2)
        assert (silent.exit_code, silent.limit) == (None, "silence"), f"a silent command gave {silent}"
        assert await says(box, "echo alive") == "alive\n", "the box did not survive the limit on silence"


async def invalid_utf8_is_replaced(make: SandboxFactory) -> None:
    """Never a crash (case X10)."""
    async with opened(make) as provider:
        box = await provider.create()
        await box.write("bad.txt", b"\xff\xfe fine \xc3\n")
        output = await says(box, "cat bad.txt")
        assert "fine" in output and "\ufffd" in output, f"invalid bytes came out as {output!r}"
        output.encode()


async def snapshots_keep_files(make: SandboxFactory) -> None:
    """A restored box has the files, directory and variables of the moment, and nothing flows between the two."""
    async with opened(make) as provider:
        box = await provider.create()
        await box.write("sub/a.txt", b"before\n")
        await says(box, "cd sub")
        await says(box, "export MOOD=calm")
        snapshot_id = await box.snapshot()
        assert await says(box, "cat a.txt") == "before\n", "a snapshot changed the box"
        await box.write("sub/a.txt", b"after\n")
        await says(box, "export MOOD=wild")
        twin = await provider.restore(snapshot_id)
        assert await twin.read("sub/a.txt") == b"before\n", "a restored box does not have the snapshot's files"
        assert await says(twin, "cat a.txt") == "before\n", "a restored box is not in the snapshot's directory"
        assert await says(twin, "echo $MOOD") == "calm\n", "a restored box does not have the snapshot's variables"
        await twin.write("sub/a.txt", b"twin\n")
        assert await box.read("sub/a.txt") == b"after\n", "a restored box writes into the one it came from"
        third = await provider.restore(snapshot_id)
        assert await third.read("sub/a.txt") == b"before\n", "a restored box changed the snapshot"
        error = await refusal(lambda: provider.restore("no-such-snapshot"))
        assert isinstance(error, KeyError), f"restoring an unknown snapshot raised {error!r}, not KeyError"


async def snapshots_of_snapshots(make: SandboxFactory) -> None:
    """What a restored box changed and removed is in the snapshot of it."""
    async with opened(make) as provider:
        box = await provider.create()
        for name in ("kept", "changed", "removed"):
            await box.write(f"d/{name}.txt", name.encode())
        for turn in range(3):
            box = await provider.restore(await box.snapshot())
            await box.write("d/changed.txt", b"%d" % turn)
            await box.run("rm d/removed.txt", LIMIT_S)
        last = await provider.restore(await box.snapshot())
        assert await last.read("d/kept.txt") == b"kept", "a file got lost"
        assert await last.read("d/changed.txt") == b"2", "a change got lost"
        error = await refusal(lambda: last.read("d/removed.txt"))
        assert isinstance(error, FileNotFoundError), "a removed file came back"


async def discarded_snapshots_are_gone(make: SandboxFactory) -> None:
    """Boxes that were restored from one go on; what is not there is passed over."""
    async with opened(make) as provider:
        box = await provider.create()
        await box.write("a.txt", b"a")
        snapshot_id = await box.snapshot()
        twin = await provider.restore(snapshot_id)
        await provider.discard(snapshot_id)
        await provider.discard(snapshot_id)
        assert await twin.read("a.txt") == b"a", "a restored box lost its files with the snapshot"
        again = await provider.restore(await twin.snapshot())
        assert await again.read("a.txt") == b"a", "a snapshot needs one that was discarded"
        error = await refusal(lambda: provider.restore(snapshot_id))
        assert isinstance(error, KeyError), f"restoring a discarded one raised {error!r}, not KeyError"


async def boxes_share_nothing(make: SandboxFactory) -> None:
    """Neither files nor names (case X13)."""
    async with opened(make) as provider:
        one, other = await provider.create(), await provider.create()
        assert one.sandbox_id != other.sandbox_id, "two boxes have one id"
        await one.write("secret.txt", b"mine")
        error = await refusal(lambda: other.read("secret.txt"))
        assert isinstance(error, FileNotFoundError), "one box reads another's file"


async def close_is_final_and_safe_twice(make: SandboxFactory) -> None:
    """A closed box does nothing more, nor does a closed provider."""
    async with opened(make) as provider:
        box = await provider.create()
        await box.close()
        assert await refusal(box.close) is None, "the second close raised"
        calls = (lambda: box.run("true", LIMIT_S), lambda: box.read("a"), lambda: box.write("a", b""), box.snapshot)
        for call in calls:
            error = await refusal(call)
            assert isinstance(error, SandboxDied), f"a closed box ran a command, or did not say so but {error!r}"
        await provider.close()
        assert await refusal(provider.close) is None, "the second close of the provider raised"
        assert await refusal(provider.create) is not None, "a closed provider made a box"


async def the_reaper_spares_the_living(make: SandboxFactory) -> None:
    """Only boxes whose owner is gone are removed (case X17)."""
    async with opened(make) as provider:
        assert provider.mode, "a provider says how it isolates"
        box = await provider.create()
        assert await provider.reap() >= 0, "reap counts what it removed"
        assert await says(box, "echo here") == "here\n", "the reaper removed a box that is in use"


SANDBOX_SUITE: dict[str, Callable[[SandboxFactory], Awaitable[None]]] = {
    check.__name__: check
    for check in (
        commands_run,
        a_command_that_does_not_parse_is_an_ordinary_error,
        directory_and_variables_last,
        files_are_bytes,
        time_outs_are_results,
        invalid_utf8_is_replaced,
        snapshots_keep_files,
        snapshots_of_snapshots,
        discarded_snapshots_are_gone,
        boxes_share_nothing,
        close_is_final_and_safe_twice,
        the_reaper_spares_the_living,
    )
}
