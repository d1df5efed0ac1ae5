"""What every `SandboxProvider` and its boxes must do. Run each function of `SANDBOX_SUITE` with a factory of yours.

The commands are those that any shell has: echo, cat, true, false, sleep, rm.
"""

import asyncio
from collections.abc import Awaitable, Callable

from headrace.platform.contracts import SandboxProvider
from headrace.platform.testing.conformance.support import refusal

SandboxFactory = Callable[[], SandboxProvider]

_LIMIT_S = 10.0


async def commands_run(make: SandboxFactory) -> None:
    """Output and exit code come back; a failure is a result."""
    box = await make().create()
    said = await box.run("echo hello", _LIMIT_S)
    assert (said.exit_code, said.output, said.limit) == (0, "hello\n", ""), f"echo hello gave {said}"
    failed = await box.run("false", _LIMIT_S)
    assert failed.exit_code not in (0, None), f"false gave {failed}"
    unknown = await box.run("no-such-command-here", _LIMIT_S)
    assert unknown.exit_code not in (0, None), f"an unknown command gave {unknown}"
    await box.close()


async def a_command_that_does_not_parse_is_an_ordinary_error(make: SandboxFactory) -> None:
    """The box goes on afterwards (case X11)."""
    box = await make().create()
    broken = await box.run('echo "unclosed', _LIMIT_S)
    assert broken.exit_code not in (0, None), f"an unclosed quote gave {broken}"
    assert (await box.run("echo still here", _LIMIT_S)).output == "still here\n", "the box did not survive it"
    await box.close()


async def files_are_bytes(make: SandboxFactory) -> None:
    """What is written is read, seen by commands, and the other way round."""
    box = await make().create()
    data = bytes(range(256))
    await box.write("data.bin", data)
    assert await box.read("data.bin") == data, "a file does not come back byte for byte"
    await box.write("note.txt", b"one\n")
    assert (await box.run("cat note.txt", _LIMIT_S)).output == "one\n", "a command does not see a written file"
    await box.run("echo two > made.txt", _LIMIT_S)
    assert await box.read("made.txt") == b"two\n", "a file that a command made is not read"
    error = await refusal(lambda: box.read("missing.txt"))
    assert isinstance(error, FileNotFoundError), f"reading a missing file raised {error!r}, not FileNotFoundError"
    await box.close()


async def time_outs_are_results(make: SandboxFactory) -> None:
    """A command that outruns its limit is an observation for the model (P27)."""
    box = await make().create()
    async with asyncio.timeout(_LIMIT_S):
        late = await box.run("sleep 60", 0.2)
    assert late.exit_code is None, f"a killed command has no exit code, but {late}"
    assert late.limit, "the result does not say which limit ended it"
    assert (await box.run("echo alive", _LIMIT_S)).output == "alive\n", "the box did not survive a time-out"
    await box.close()


async def invalid_utf8_is_replaced(make: SandboxFactory) -> None:
    """Never a crash (case X10)."""
    box = await make().create()
    await box.write("bad.txt", b"\xff\xfe fine \xc3\n")
    output = (await box.run("cat bad.txt", _LIMIT_S)).output
    assert "fine" in output and "\ufffd" in output, f"invalid bytes came out as {output!r}"
    output.encode()
    await box.close()


async def snapshots_keep_files(make: SandboxFactory) -> None:
    """A restored box has the files of the moment, and nothing flows between the two."""
    provider = make()
    box = await provider.create()
    await box.write("a.txt", b"before\n")
    snapshot_id = await box.snapshot()
    await box.write("a.txt", b"after\n")
    twin = await provider.restore(snapshot_id)
    assert await twin.read("a.txt") == b"before\n", "a restored box does not have the snapshot's files"
    await twin.write("a.txt", b"twin\n")
    assert await box.read("a.txt") == b"after\n", "a restored box writes into the one it came from"
    third = await provider.restore(snapshot_id)
    assert await third.read("a.txt") == b"before\n", "a restored box changed the snapshot"
    assert await refusal(lambda: provider.restore("no-such-snapshot")) is not None, "an unknown snapshot was restored"
    for one in (box, twin, third):
        await one.close()


async def boxes_share_nothing(make: SandboxFactory) -> None:
    """Neither files nor names (case X13)."""
    provider = make()
    one, other = await provider.create(), await provider.create()
    assert one.sandbox_id != other.sandbox_id, "two boxes have one id"
    await one.write("secret.txt", b"mine")
    error = await refusal(lambda: other.read("secret.txt"))
    assert isinstance(error, FileNotFoundError), "one box reads another's file"
    await one.close()
    await other.close()


async def close_is_final_and_safe_twice(make: SandboxFactory) -> None:
    """A closed box does nothing more."""
    box = await make().create()
    await box.close()
    assert await refusal(box.close) is None, "the second close raised"
    assert await refusal(lambda: box.run("true", _LIMIT_S)) is not None, "a closed box ran a command"


async def the_reaper_spares_the_living(make: SandboxFactory) -> None:
    """Only boxes whose owner is gone are removed (case X17)."""
    provider = make()
    assert provider.mode, "a provider says how it isolates"
    box = await provider.create()
    assert await provider.reap() >= 0, "reap counts what it removed"
    assert (await box.run("echo here", _LIMIT_S)).output == "here\n", "the reaper removed a box that is in use"
    await box.close()


SANDBOX_SUITE: dict[str, Callable[[SandboxFactory], Awaitable[None]]] = {
    check.__name__: check
    for check in (
        commands_run,
        a_command_that_does_not_parse_is_an_ordinary_error,
        files_are_bytes,
        time_outs_are_results,
        invalid_utf8_is_replaced,
        snapshots_keep_files,
        boxes_share_nothing,
        close_is_final_and_safe_twice,
        the_reaper_spares_the_living,
    )
}
